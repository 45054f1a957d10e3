// Small helpers for building the page. Text always enters it as text nodes, never as markup.

export const byId = (id) => document.getElementById(id);

/** A new element; `properties` are set on it, `children` (nodes or strings) are put into it. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

/** A button with a handler. `label` says what it does where its text does not. */
export function button(text, onClick, { className = "", label = "" } = {}) {
  const element = make("button", { type: "button", className }, text);
  if (label) {
    element.setAttribute("aria-label", label);
    element.title = label;
  }
  element.addEventListener("click", onClick);
  return element;
}
