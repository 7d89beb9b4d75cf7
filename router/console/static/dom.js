// Small helpers over the DOM. Text only ever goes in as text.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Writes only what is different, so that nothing blinks and a reader's selection stays.
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Makes the children of `parent` those of `items`, in order: the nodes of known keys are kept and moved.
export function keyed(parent, items, keyOf, make, fill) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    let node = known.get(key);
    known.delete(key);
    if (!node) {
      node = make(item);
      node.dataset.key = key;
    }
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
    fill(node, item);
  });
  for (const node of known.values()) node.remove();
}

// A bar of parts: [class, share of 1]. What is left is ground; what is too much (rounded counts) is taken from all.
export function bar(node, parts, label) {
  const sum = Math.max(1, parts.reduce((total, [, share]) => total + Math.max(0, share), 0));
  while (node.children.length < parts.length) node.append(element("span"));
  while (node.children.length > parts.length) node.lastChild.remove();
  parts.forEach(([name, share], index) => {
    const part = node.children[index];
    if (part.className !== name) part.className = name;
    const width = `${(100 * Math.max(0, share / sum)).toFixed(2)}%`;
    if (part.style.width !== width) part.style.width = width;
  });
  attribute(node, "aria-label", label);
  attribute(node, "title", label);
}
