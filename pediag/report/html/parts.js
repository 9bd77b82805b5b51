// The parts of a target: its findings, its encodings with pictures, what became of the rules.
const pictures = [];

function excerpt(lines, marked) {
  if (!lines.length) return null;
  const rows = lines.map(([number, text]) =>
    el('span', { class: number === marked ? 'row marked' : 'row', title: number === marked ? 'the line in question' : null }, el('i', {}, String(number)), text || ' '));
  return el('pre', { class: 'excerpt', role: 'group', tabindex: 0, 'aria-label': `Source around line ${marked}` }, el('code', {}, rows));
}

const item = (head, ...parts) => el('div', { class: ['where', 'effect', 'fix', 'modules', 'tensors'].includes(head) ? 'wide' : null }, el('dt', {}, head), el('dd', { class: 'text' }, parts));

function finding(given, target, place) {
  const rows = [
    item('where', [given.encoding && code(given.encoding), given.encoding && given.module ? ' in ' : '', given.module && code(given.module), el('div', {}, code(given.place), excerpt(given.excerpt, given.line))]),
    ...given.numbers.map(([head, value]) => item(head, prose(value))),
  ];
  if (given.again) rows.push(item('baseline', `known, and worse now: ${given.again}`));
  if (given.effect) rows.push(item('effect', prose(given.effect)));
  if (given.fix) rows.push(item('fix', el('span', { class: 'fix' }, prose(given.fix)), el('span', { class: 'applies' }, ` (${given.applicability})`), given.patch ? el('pre', { class: 'patch mono', tabindex: 0 }, given.patch) : null));
  const more = [item('basis', given.basis), given.references.length ? item('references', given.references.join('; ')) : null, item('fingerprint', code(given.fingerprint))];
  const made = el('article', { class: `finding ${given.severity}`, id: `${target}-${place}` },
    el('h4', {}, el('b', { class: given.severity }, given.severity), ' ', el('b', {}, given.code), ' ', el('span', { class: 'soft' }, given.name)),
    el('p', { class: 'said text' }, prose(given.message)),
    el('dl', {}, rows),
    el('details', {}, el('summary', {}, 'basis and references'), el('dl', {}, more)));
  made.facts = { severity: given.severity, family: given.code.slice(0, 3), text: made.textContent.toLowerCase() };
  return made;
}

// -- encodings ---------------------------------------------------------------------------------------------

const spans = (layers) => {
  const runs = [];
  for (const layer of layers) {
    const last = runs[runs.length - 1];
    if (last && layer === last[1] + 1) last[1] = layer;
    else runs.push([layer, layer]);
  }
  return runs;
};

function strip(given) {
  const words = `${given.path}: ${given.layers.length} of ${given.depth} layers`;
  const gap = given.depth > 40 ? 0 : 0.05;
  const blocks = gap ? Array.from({ length: given.depth }, (_, k) => draw('rect', { class: given.layers.includes(k) ? 'on' : 'off', x: k + gap, width: 1 - 2 * gap, height: 1 }))
    : [draw('rect', { class: 'off', width: given.depth, height: 1 }), ...spans(given.layers).map(([a, b]) => draw('rect', { class: 'on', x: a, width: b - a + 1, height: 1 }))];
  const runs = spans(given.layers).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(', ');
  return el('div', {}, draw('svg', { class: 'strip', viewBox: `0 0 ${given.depth} 1`, preserveAspectRatio: 'none', role: 'img', 'aria-label': words }, draw('title', {}, words), blocks),
    el('span', { class: 'soft small' }, given.path && [code(given.path), ' '], runs));
}

function encodings(given) {
  const heads = ['encoding', 'recognised as', 'where', 'applied at'];
  const rows = given.map((one) => el('tr', { class: one.encodes ? '' : 'dim' },
    el('th', { scope: 'row' }, code(one.id)),
    el('td', { 'data-head': '' , class: 'text' }, one.title, one.doubt ? el('div', { class: 'warning small' }, `uncertain: ${one.doubt}`) : null, el('div', { class: 'soft small' }, `read off ${one.origin}`)),
    el('td', { 'data-head': '' }, one.stacks.length ? one.stacks.slice(0, 4).map(strip) : el('span', { class: 'text' }, one.users)),
    el('td', { 'data-head': one.place ? 'at' : null }, one.place ? code(one.place) : null)));
  return el('table', { class: 'stack fixed' }, el('caption', {}, 'What tells this model where a token is, and in which layers.'),
    el('thead', {}, el('tr', {}, heads.map((head) => el('th', { scope: 'col' }, head)))), el('tbody', {}, rows));
}

function about(one) {
  const parameters = one.parameters.map(([name, value]) => item(name, value));
  const places = one.sites.map(([kind, place, count]) => el('li', {}, `${kind} `, place ? code(place) : null, count > 1 ? ` × ${count}` : ''));
  const more = [...parameters, one.modules.length ? item('modules', one.modules.join(', ')) : null, one.tensors.length ? item('tensors', one.tensors.join(', ')) : null];
  const named = [code(one.id), ' ', el('span', { class: 'soft text' }, one.title)];
  const facts = [excerpt(one.excerpt, one.line), el('dl', {}, more), places.length ? el('ul', { class: 'notes' }, places) : null];
  if (!one.pictures.length) return el('section', { class: 'about plain' }, el('details', {}, el('summary', {}, named), facts));
  return el('section', { class: 'about' }, el('h4', {}, named),
    el('div', { class: 'pictures' }, one.pictures.map(figure)),
    el('details', {}, el('summary', {}, 'parameters and places'), facts));
}

function figure(picture) {
  const drawing = el('div', { class: 'drawing' });
  pictures.push({ picture, drawing });
  return el('figure', {}, el('h5', {}, picture.title), picture.kind === 'plot' ? legend(picture) : null, drawing, picture.kind === 'plot' ? el('p', { class: 'readout', 'aria-live': 'polite' }) : null, el('figcaption', {}, picture.words));
}

function redraw() {
  const widths = pictures.map(({ drawing }) => Math.floor(drawing.clientWidth)); // all at once: drawing changes the layout
  pictures.forEach(({ picture, drawing }, k) => {
    if (widths[k] > 60) drawing.replaceChildren(picture.kind === 'plot' ? plot(picture, widths[k]) : map(picture, widths[k]));
  });
}

function aside(given) {
  const rows = given.map(([kind, each, said, why]) => el('tr', {}, el('th', { scope: 'row' }, each), el('td', {}, kind), el('td', { class: 'text' }, prose(said)), el('td', { class: 'text soft' }, why)));
  return el('table', { class: 'stack' }, el('caption', {}, 'These do not count against the target.'), el('thead', {}, el('tr', {}, ['rule', 'is', 'finding', 'why'].map((head) => el('th', { scope: 'col' }, head)))), el('tbody', {}, rows));
}

// -- rules -------------------------------------------------------------------------------------------------

const STATUS = { fail: 'found something', 'could-not-check': 'could not check', pass: 'found nothing', 'not-applicable': 'not applicable' };

// The rows of a status are made when it is first unfolded: many targets have tens of thousands.
function statuses(given, rules) {
  return given.filter((one) => one.reasons.length).map(({ status, reasons }) => {
    const entries = reasons.flatMap(([reason, codes]) => codes.map((each) => entry(each, rules[each], reason, status)));
    entries.sort((a, b) => (a.facts.code < b.facts.code ? -1 : 1));
    const made = el('details', { 'data-status': status }, el('summary', {}, el('b', {}, `${entries.length} ${STATUS[status]}`)));
    made.entries = entries;
    made.addEventListener('toggle', () => made.open && unfold(made));
    return made;
  });
}

function entry(each, rule, reason, status) {
  const text = `${each} ${rule.name} ${rule.summary} ${reason}`.toLowerCase();
  return { rule, reason, shown: true, facts: { status, code: each, family: each.slice(0, 3), text } };
}

function unfold(group) {
  group.open = true;
  if (group.querySelector('table')) return;
  const heads = ['rule', 'asks', 'reason'].map((head) => el('th', { scope: 'col' }, head));
  group.append(el('table', { class: 'stack' }, el('thead', {}, el('tr', {}, heads)), el('tbody', {}, group.entries.map(row))));
}

function row(one) {
  const { rule, reason, facts } = one;
  one.row = el('tr', { hidden: !one.shown }, el('th', { scope: 'row' }, facts.code, ' ', el('span', { class: 'soft small' }, rule.name)), el('td', { class: 'text' }, prose(rule.summary)), el('td', { class: 'text soft' }, prose(reason)));
  return one.row;
}
