// Puts the page together, and keeps filters and colours, which stand in the address after #.
const DATA = JSON.parse(document.getElementById('data').textContent);
const SEVERITIES = ['error', 'warning', 'note'];
const FEW = 20; // targets up to which what could not be checked is unfolded
const state = { q: '', severity: new Set(SEVERITIES), family: '', status: '', theme: '' };

function headline() {
  const head = document.getElementById('verdict'), text = DATA.verdict;
  const word = ['FAIL', 'PASS', 'NOTHING CHECKED', 'STOPPED'].find((each) => text.startsWith(each));
  if (word) head.replaceChildren(el('b', { class: word.split(' ')[0] }, word), text.slice(word.length));
}

function overview() {
  const rows = DATA.targets.map((target, index) => el('tr', {},
    el('th', { scope: 'row' }, el('a', { href: `#t${index}` }, code(target.spec))),
    el('td', {}, el('b', { class: target.verdict.split(' ')[0] }, target.verdict)),
    el('td', { class: 'text' }, target.said),
    el('td', { class: 'text soft' }, target.encodings.filter((one) => one.encodes).map((one) => one.title).join('; '))));
  const heads = ['target', 'verdict', 'found', 'recognised'].map((head) => el('th', { scope: 'col' }, head));
  return el('section', { class: 'target' }, el('h2', {}, 'Targets'), el('table', { class: 'stack fixed overview' }, el('thead', {}, el('tr', {}, heads)), el('tbody', {}, rows)));
}

function target(given, index) {
  const name = `t${index}`;
  const several = DATA.targets.length > 1; // the head of the page says it of one
  const parts = [el('h2', {}, several && [el('b', { class: given.verdict.split(' ')[0] }, given.verdict), ' '], code(given.spec)),
    el('p', { class: 'facts text' }, [...(several || given.verdict === 'STOPPED' || given.said.includes('--strict') ? [given.said] : []), ...given.facts].join(' · '))];
  if (given.findings.length) parts.push(el('h3', {}, 'Findings'), given.findings.map((one, k) => finding(one, name, k)), el('p', { class: 'none soft', hidden: true }, 'No finding here matches the filter.'));
  if (given.aside.length) parts.push(el('h3', {}, 'Set aside'), aside(given.aside));
  if (given.verdict !== 'STOPPED') {
    parts.push(el('h3', {}, 'Encodings'));
    parts.push(given.encodings.length ? encodings(given.encodings) : el('p', { class: 'soft' }, 'No position encoding was recognised.'), given.encodings.map(about));
  }
  if (given.statuses.some((one) => one.reasons.length)) parts.push(el('section', { class: 'rules' }, el('h3', {}, 'Rules'), statuses(given.statuses, DATA.rules)));
  if (given.notes.length) parts.push(el('h3', {}, 'Notes'), el('ul', { class: 'notes' }, given.notes.map((note) => el('li', { class: 'text' }, prose(note)))));
  return el('section', { class: 'target', id: name, tabindex: -1 }, parts);
}

// -- filters -----------------------------------------------------------------------------------------------

function options(label, name, given) {
  const list = el('select', { id: name, 'aria-label': label, on: { change: (event) => { state[name] = event.target.value; filter(true); } } },
    given.map(([value, text]) => el('option', { value }, text)));
  return list;
}

function bar() {
  const counts = SEVERITIES.map((_, k) => DATA.targets.reduce((sum, one) => sum + (one.counts[k] || 0), 0));
  const chips = SEVERITIES.map((name, k) => el('button', { type: 'button', class: name, id: `only-${name}`, on: { click: () => { toggle(name); filter(true); } } }, `${name} ${counts[k]}`));
  const families = [...new Map(Object.entries(DATA.rules).map(([each, rule]) => [each.slice(0, 3), rule.family])).entries()].sort();
  document.getElementById('bar').replaceChildren(
    el('input', { type: 'search', id: 'q', placeholder: 'Search findings and rules', 'aria-label': 'Search findings and rules', on: { input: (event) => { state.q = event.target.value; filter(true); } } }),
    el('fieldset', { class: 'chips', 'aria-label': 'Severities shown' }, chips),
    options('Family of rules', 'family', [['', 'all families'], ...families.map(([each, name]) => [each, `${each} ${name}`.trim()])]),
    options('Status of rules', 'status', [['', 'all statuses'], ...Object.entries(STATUS)]),
    el('button', { type: 'button', id: 'theme', on: { click: nextTheme } }, 'colours'),
    el('output', { 'aria-live': 'polite' }));
}

function toggle(name) {
  if (state.severity.has(name)) state.severity.delete(name);
  else state.severity.add(name);
}

const matches = (facts) => (!state.family || facts.family === state.family)
  && state.q.toLowerCase().split(/\s+/).every((word) => facts.text.includes(word));

function filter(remember) {
  const found = [...document.querySelectorAll('.finding')], groups = [...document.querySelectorAll('.rules details')];
  for (const one of found) one.hidden = !(state.severity.has(one.facts.severity) && matches(one.facts) && (!state.status || state.status === 'fail'));
  for (const group of groups) {
    for (const one of group.entries) {
      one.shown = matches(one.facts) && (!state.status || state.status === one.facts.status);
      if (one.row) one.row.hidden = !one.shown;
    }
    group.hidden = !group.entries.some((one) => one.shown);
    if (state.status && !group.hidden && DATA.targets.length <= FEW) unfold(group);
  }
  for (const none of document.querySelectorAll('.none')) none.hidden = Boolean(none.parentElement.querySelector('.finding:not([hidden])'));
  for (const name of SEVERITIES) document.getElementById(`only-${name}`).setAttribute('aria-pressed', String(state.severity.has(name)));
  const rows = groups.flatMap((group) => group.entries);
  const count = (all, shows) => `${all.filter(shows).length} of ${all.length}`;
  document.querySelector('#bar output').textContent = `${count(found, (one) => !one.hidden)} findings and ${count(rows, (one) => one.shown)} rules shown`;
  if (remember) address();
}

function address() {
  const words = new URLSearchParams();
  for (const name of ['q', 'family', 'status', 'theme']) if (state[name]) words.set(name, state[name]);
  if (state.severity.size < SEVERITIES.length) words.set('severity', [...state.severity].join(','));
  try {
    history.replaceState(null, '', `#${words}`);
  } catch { /* a viewer that forbids it: filters work all the same */ }
}

function recall() {
  if (!location.hash.includes('=')) return;
  const words = new URLSearchParams(location.hash.slice(1));
  for (const name of ['q', 'family', 'status']) {
    document.getElementById(name).value = state[name] = words.get(name) || '';
  }
  if (words.has('severity')) state.severity = new Set(words.get('severity').split(',').filter((name) => SEVERITIES.includes(name)));
  state.theme = ['light', 'dark'].includes(words.get('theme')) ? words.get('theme') : '';
}

// -- colours, width, print ---------------------------------------------------------------------------------

function paint() {
  const root = document.documentElement;
  if (state.theme) root.setAttribute('data-theme', state.theme);
  else root.removeAttribute('data-theme');
  document.getElementById('theme').textContent = `${state.theme || 'auto'} colours`;
  redraw();
}

function nextTheme() {
  state.theme = { '': 'light', light: 'dark', dark: '' }[state.theme];
  paint();
  address();
}

const kept = [];
function beforePrint() {
  for (const one of document.querySelectorAll('details:not([open])')) {
    kept.push(one);
    if (one.entries) unfold(one);
    one.open = true;
  }
  document.documentElement.setAttribute('data-theme', 'light');
  redraw();
}

function afterPrint() {
  for (const one of kept.splice(0)) one.open = false;
  paint();
}

function start() {
  headline();
  bar();
  const parts = DATA.targets.map(target);
  if (DATA.targets.length > 1) parts.unshift(overview());
  if (DATA.notes.length) parts.push(el('section', {}, el('h3', {}, 'Notes on the targets'), el('ul', { class: 'notes' }, DATA.notes.map((note) => el('li', { class: 'text' }, prose(note))))));
  document.getElementById('main').replaceChildren(...parts);
  recall();
  filter(false);
  if (DATA.targets.length <= FEW) document.querySelectorAll('details[data-status="could-not-check"]').forEach(unfold);
  paint();
  let waiting = 0, width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  }).observe(document.body);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  addEventListener('hashchange', () => { recall(); filter(false); paint(); });
  addEventListener('beforeprint', beforePrint);
  addEventListener('afterprint', afterPrint);
}
start();
