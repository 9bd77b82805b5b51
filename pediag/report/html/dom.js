// Makes elements; every text becomes a text node, so none can be markup.
const make = (space, tag, given, parts) => {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(given || {})) {
    if (name === 'on') for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (value === true) made.setAttribute(name, '');
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...parts.flat(2).filter((part) => part !== null && part !== undefined && part !== '' && part !== false));
  return made;
};
const el = (tag, given, ...parts) => make('', tag, given, parts);
const draw = (tag, given, ...parts) => make('http://www.w3.org/2000/svg', tag, given, parts);
const code = (text) => el('code', { class: 'mono' }, text);
// Text in which `backticks` stand around code.
const prose = (text) => text.split('`').map((part, k, all) => (k % 2 === 0 ? part : k < all.length - 1 ? code(part) : `\`${part}`));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const shown = (value) => {
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size < 1e-3 || size >= 1e7) return value.toExponential(size.toExponential().startsWith('1e') ? 0 : 1).replace('e+', 'e');
  return value.toLocaleString('en-US', { maximumSignificantDigits: 6 });
};
