// Elements without markup: what a model writes only ever becomes text.

/** An element with children (nodes, texts, lists of them, null for none); functions among the attributes listen to the event of their name, null and false are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null) element.append(child);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const [image, use] = ["svg", "use"].map((tag) => document.createElementNS(SVG, tag));
  image.setAttribute("class", "icon");
  image.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `page/icons.svg#${name}`);
  image.append(use);
  return image;
}

/** A button that is an icon; its label is what a screen reader says. */
export function iconButton(name, label, click) {
  return make("button", { class: "plain", type: "button", "aria-label": label, title: label, click }, icon(name));
}

/** Copy a text. Browsers give pages without TLS no clipboard, but they let them copy a selection. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { class: "unseen", readonly: true });
  field.value = text;
  document.body.append(field);
  const focused = document.activeElement;
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.classList.add("done");
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.classList.remove("done");
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}
