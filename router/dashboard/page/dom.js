// Functions that create elements from text only: no string is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** Create an element. `attributes`: text; functions become listeners; null and false are omitted. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Change a text only if it differs, so that screen readers and selections are not disturbed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Create a bar of parts: [class, share of the whole, name], with a label for screen readers. */
export function bar(parts, label, className = "bar") {
  const element = h("div", { class: className, role: "img", "aria-label": label, title: label });
  for (const [name, share] of parts) {
    if (!(share > 0)) continue;
    const part = h("i", { class: name });
    part.style.width = `${Math.min(share, 1) * 100}%`;
    element.append(part);
  }
  return element;
}

/** Replace the children, unless they are the same. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter(Boolean));
}

/** Update a list of elements from items; elements with known keys stay, with their focus. */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.known = new Map();
  }

  show(items, keyOf) {
    const keys = new Set(items.map(keyOf));
    for (const [key, each] of this.known) {
      if (!keys.has(key)) {
        each.element.remove();
        this.known.delete(key);
      }
    }
    let place = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      let each = this.known.get(key);
      if (each === undefined) {
        each = this.make(item);
        this.known.set(key, each);
      }
      each.update(item);
      if (each.element === place) place = place.nextElementSibling;
      else this.parent.insertBefore(each.element, place);
    }
  }
}
