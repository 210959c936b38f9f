// Elements, made of text and nothing else: no string is ever read as HTML.

export const byId = (id) => document.getElementById(id);

/** An element. `attributes`: text; functions listen; null and false are left out. */
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

/** Change a text only where it differs: screen readers and selections are left in peace. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** A bar of parts: [class, share of the whole, what it is]. It says in words what it shows. */
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

/** Put these where what was there is, unless it is the same. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat().filter(Boolean));
}

/** Keep a list of elements in step with items: those with known keys stay, and their focus. */
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
