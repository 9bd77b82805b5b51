// Draws pictures from their numbers. Axes are chosen here; what is drawn is chosen where the numbers are made.
const FRAME = { left: 52, right: 14, top: 24, bottom: 38, height: 250 };

function scale(values, log, from, to) {
  const usable = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  let low = Math.min(...usable), high = Math.max(...usable);
  if (!usable.length) [low, high] = log ? [1, 10] : [0, 1];
  const turn = log ? Math.log10 : (value) => value;
  let [a, b] = [turn(low), turn(high)];
  if (b - a < 1e-12) [a, b] = log ? [a - 0.5, b + 0.5] : [a - Math.max(Math.abs(a) / 2, 0.5), b + Math.max(Math.abs(b) / 2, 0.5)];
  const place = (value) => from + ((turn(value) - a) / (b - a)) * (to - from);
  return { place, ticks: log ? decades(a, b) : even(a, b), fits: (value) => (!log || value > 0) && Number.isFinite(value) };
}

function padded(values, log) {
  const usable = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  if (!usable.length) return values;
  const low = Math.min(...usable), high = Math.max(...usable);
  return log ? [low / 1.5, high * 1.5] : [low - (high - low) * 0.06, high + (high - low) * 0.06];
}

function decades(a, b) {
  const step = Math.max(1, Math.ceil((b - a) / 6));
  const ticks = [];
  for (let power = Math.ceil(a - 1e-9); power <= b + 1e-9; power += 1) if (power % step === 0) ticks.push(10 ** power);
  if (ticks.length > 2 || b - a > 2.5) return ticks;
  const finer = [];
  for (let power = Math.floor(a); power <= b; power += 1)
    for (const digit of [1, 2, 5]) if (Math.log10(digit) + power >= a - 1e-9 && Math.log10(digit) + power <= b + 1e-9) finer.push(digit * 10 ** power);
  return finer;
}

function even(a, b) {
  const rough = (b - a) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const ticks = [];
  for (let index = Math.ceil(a / step - 1e-9); index * step <= b + step * 1e-9; index += 1) ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

function tint(picture, index) {
  if (!picture.ramp) return `var(--s${index % 6})`;
  const share = picture.series.length > 1 ? Math.round((100 * index) / (picture.series.length - 1)) : 0;
  return `color-mix(in oklab, var(--s1) ${share}%, var(--s0))`;
}

const DASHES = ['', '7 3', '2 3', '9 3 2 3', '5 2 1 2 1 2'];
function dashes(picture, index) {
  if (picture.series[index].as === 'dashes') return '1 4';
  return picture.ramp ? '' : DASHES[index % DASHES.length];
}

function stroke(item, picture, index) {
  item.style.stroke = tint(picture, index);
  if (dashes(picture, index)) item.setAttribute('stroke-dasharray', dashes(picture, index));
  return item;
}

function plot(picture, width) {
  const { left, right, top, bottom, height } = FRAME;
  const all = [...picture.series.flatMap((series) => series.points)];
  const bands = picture.bands.flatMap((band) => band.points);
  const marked = (axis) => picture.marks.filter((mark) => axis in mark).map((mark) => mark[axis]);
  const x = scale([...all.map((p) => p[0]), ...bands.map((p) => p[0])], picture.x.log, left, width - right);
  const ys = [...all.map((p) => p[1]), ...bands.flatMap((p) => [p[1], p[2]]), ...marked('y')];
  const y = scale(padded(ys, picture.y.log), picture.y.log, height - bottom, top);
  const parts = [...axes(picture, x, y, width)];
  for (const band of picture.bands) parts.push(ribbon(band, x, y));
  picture.series.forEach((series, index) => parts.push(...curve(picture, series, index, x, y)));
  for (const mark of picture.marks) parts.push(...line(mark, x, y, width));
  const sheet = draw('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'img', tabindex: 0, 'aria-label': `${picture.title}. ${picture.words}` }, parts);
  return readable(sheet, picture, x, width);
}

// The values where the pointer is, or where the arrow keys lead, are written below the drawing.
function readable(sheet, picture, x, width) {
  const { top, bottom, height } = FRAME;
  const places = [...new Set([...picture.series, ...picture.bands].flatMap((one) => one.points.map((p) => p[0])))].filter(x.fits).sort((a, b) => a - b);
  const cursor = draw('line', { class: 'cursor', visibility: 'hidden', y1: top, y2: height - bottom });
  sheet.append(cursor);
  let at = -1;
  const show = (k) => {
    at = Math.max(0, Math.min(places.length - 1, k));
    const here = x.place(places[at]);
    cursor.setAttribute('visibility', 'visible');
    cursor.setAttribute('x1', here);
    cursor.setAttribute('x2', here);
    sheet.parentElement.nextElementSibling.textContent = [`${picture.x.label}: ${shown(places[at])}`, ...values(picture, places[at])].join(' · ');
  };
  const nearest = (event) => {
    const box = sheet.getBoundingClientRect(), here = ((event.clientX - box.left) * width) / box.width;
    show(places.reduce((best, value, k) => (Math.abs(x.place(value) - here) < Math.abs(x.place(places[best]) - here) ? k : best), 0));
  };
  sheet.addEventListener('pointermove', nearest);
  sheet.addEventListener('pointerdown', nearest);
  sheet.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !places.length) return;
    event.preventDefault();
    show(step === Infinity ? places.length - 1 : step === -Infinity ? 0 : at + step);
  });
  return sheet;
}

const brief = (value) => shown(Number(value.toPrecision(4)));

function values(picture, at) {
  const found = [...picture.bands.flatMap((band) => band.points.filter((p) => p[0] === at).map((p) => `${band.name}: ${brief(p[1])} to ${brief(p[2])}`)),
    ...picture.series.flatMap((series) => series.points.filter((p) => p[0] === at).map((p) => `${series.name}: ${brief(p[1])}`))];
  return found.length > 8 ? [...found.slice(0, 4), `and ${found.length - 4} more`] : found;
}

function* axes(picture, x, y, width) {
  const { left, right, top, bottom, height } = FRAME;
  for (const value of y.ticks) {
    const at = y.place(value);
    yield draw('line', { class: 'grid', x1: left, x2: width - right, y1: at, y2: at });
    yield draw('text', { x: left - 7, y: at + 4, 'text-anchor': 'end' }, shown(value));
  }
  let last = -Infinity;
  for (const value of x.ticks) {
    const at = x.place(value), text = shown(value), half = text.length * 3.3;
    yield draw('line', { class: 'axis', x1: at, x2: at, y1: height - bottom, y2: height - bottom + 4 });
    if (at - half < last + 6) continue;
    last = at + half;
    yield draw('text', { x: Math.min(at, width - half), y: height - bottom + 17, 'text-anchor': 'middle' }, text);
  }
  yield draw('line', { class: 'axis', x1: left, x2: width - right, y1: height - bottom, y2: height - bottom });
  yield draw('text', { x: 0, y: 12 }, picture.y.label);
  yield draw('text', { x: width - right, y: height - 4, 'text-anchor': 'end' }, picture.x.label);
}

function ribbon(band, x, y) {
  const points = band.points.filter((p) => x.fits(p[0]) && y.fits(p[1]) && y.fits(p[2]));
  const upper = points.map((p) => `${x.place(p[0]).toFixed(1)},${y.place(p[2]).toFixed(1)}`);
  const lower = points.map((p) => `${x.place(p[0]).toFixed(1)},${y.place(p[1]).toFixed(1)}`).reverse();
  const made = draw('polygon', { class: 'band', points: [...upper, ...lower].join(' ') });
  made.style.fill = made.style.stroke = 'var(--s0)';
  return made;
}

function* curve(picture, series, index, x, y) {
  const points = series.points.filter((p) => x.fits(p[0]) && y.fits(p[1])).map((p) => [x.place(p[0]), y.place(p[1])]);
  if (series.as === 'dots' || points.length === 1) {
    for (const [cx, cy] of points) {
      const dot = draw('circle', { cx: cx.toFixed(1), cy: cy.toFixed(1), r: 2.6, 'stroke-width': 1.3 });
      dot.style.stroke = tint(picture, index);
      dot.style.fill = index && series.as === 'dots' ? 'none' : tint(picture, index);
      yield dot;
    }
    return;
  }
  let path = '';
  points.forEach(([px, py], k) => {
    const [ax, ay] = [px.toFixed(1), py.toFixed(1)];
    path += k === 0 ? `M${ax},${ay}` : series.as === 'steps' ? `H${ax}V${ay}` : `L${ax},${ay}`;
  });
  yield stroke(draw('path', { class: 'line', d: path }), picture, index);
}

function* line(mark, x, y, width) {
  const { left, right, top, bottom, height } = FRAME;
  if ('y' in mark) {
    const at = y.place(mark.y);
    yield draw('line', { class: 'markline', x1: left, x2: width - right, y1: at, y2: at });
    if (mark.label) yield draw('text', { class: 'marktext', x: left + 4, y: at - 5 }, mark.label);
  } else if (x.fits(mark.x)) {
    const at = x.place(mark.x), late = at > width / 2;
    yield draw('line', { class: 'markline', x1: at, x2: at, y1: top, y2: height - bottom });
    if (mark.label) yield draw('text', { class: 'marktext', x: at + (late ? -6 : 6), y: top + 10, 'text-anchor': late ? 'end' : 'start' }, mark.label);
  }
}

function swatch(picture, index) {
  const made = draw('svg', { viewBox: '0 0 22 9', 'aria-hidden': 'true' });
  if (picture.series[index].as === 'dots') {
    const dot = draw('circle', { cx: 11, cy: 5, r: 3, 'stroke-width': 1.3 });
    dot.style.stroke = tint(picture, index);
    dot.style.fill = index ? 'none' : tint(picture, index);
    made.append(dot);
  } else made.append(stroke(draw('path', { class: 'line', d: 'M0,5H22' }), picture, index));
  return made;
}

function legend(picture) {
  const last = picture.series.length - 1;
  const named = picture.ramp && last > 3 ? [0, last] : picture.series.map((_, index) => index);
  const items = named.map((index) => el('li', {}, swatch(picture, index), picture.series[index].name));
  if (picture.ramp && last > 3) items.splice(1, 0, el('li', {}, 'to'));
  for (const band of picture.bands) {
    const box = draw('rect', { class: 'band', width: 22, height: 9 });
    box.style.fill = 'var(--s0)';
    items.unshift(el('li', {}, draw('svg', { viewBox: '0 0 22 9', 'aria-hidden': 'true' }, box), band.name));
  }
  return el('ul', { class: 'legend' }, items);
}

// -- the heat map ------------------------------------------------------------------------------------------

const channels = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));

function shades() {
  const [low, mid, high] = ['--low', '--mid', '--high'].map((name) => channels(colour(name)));
  const mix = (a, b, share) => a.map((value, k) => Math.round(value + (b[k] - value) * share));
  return Array.from({ length: 256 }, (_, level) => {
    const share = (level - 128) / 127;
    return level === 0 ? channels(colour('--line')) : share < 0 ? mix(mid, low, Math.min(1, -share)) : mix(mid, high, Math.min(1, share));
  });
}

function cells(picture) {
  const bytes = atob(picture.cells), width = picture.columns.length, height = picture.rows.length;
  const sheet = el('canvas', { width, height });
  const context = sheet.getContext('2d'), image = context.createImageData(width, height), palette = shades();
  for (let k = 0; k < width * height; k += 1) image.data.set([...palette[bytes.charCodeAt(k)], 255], 4 * k);
  context.putImageData(image, 0, 0);
  return sheet;
}

function map(picture, width) {
  const { left, right } = FRAME, top = 34, bottom = 38, height = 330, ratio = Math.max(window.devicePixelRatio || 1, 2);
  const sheet = el('canvas', { width: width * ratio, height: height * ratio, role: 'img', 'aria-label': `${picture.title}. ${picture.words}`, title: picture.title });
  const context = sheet.getContext('2d');
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  const across = width - left - right, down = height - top - bottom;
  context.drawImage(cells(picture), left, top, across, down);
  context.strokeStyle = colour('--line');
  context.strokeRect(left - 0.5, top - 0.5, across + 1, down + 1);
  context.font = '11.5px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
  context.fillStyle = colour('--soft');
  const write = (text, x, y, align) => { context.textAlign = align; context.fillText(text, x, y); };
  for (const k of spread(picture.rows.length, 7)) write(shown(picture.rows[k]), left - 7, top + ((k + 0.5) * down) / picture.rows.length + 4, 'right');
  for (const k of spread(picture.columns.length, width < 420 ? 4 : 6)) write(shown(picture.columns[k]), left + ((k + 0.5) * across) / picture.columns.length, top + down + 16, 'center');
  write(picture.y, 0, 24, 'left');
  write(picture.x, width - right, height - 4, 'right');
  key(context, picture, width - right, write);
  return sheet;
}

function key(context, picture, end, write) {
  const palette = shades(), wide = 90, high = shown(Number(picture.high.toPrecision(3)));
  const start = end - wide - context.measureText(high).width - 6;
  for (let k = 0; k < wide; k += 1) {
    context.fillStyle = `rgb(${palette[1 + Math.round((k * 254) / (wide - 1))].join(',')})`;
    context.fillRect(start + k, 8, 1.5, 10);
  }
  context.fillStyle = colour('--soft');
  write(`−${high}`, start - 6, 17, 'right');
  write(high, end, 17, 'right');
}

const spread = (count, most) => {
  const steps = Math.min(count, most) - 1;
  return steps < 1 ? [0] : Array.from({ length: steps + 1 }, (_, k) => Math.round((k * (count - 1)) / steps));
};
