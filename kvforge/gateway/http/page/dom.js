// Elements, and copying. Whatever becomes part of the page becomes a node or a text, never markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function button(words, act) {
  return element("button", { type: "button", textContent: words, onclick: act });
}

// A button that copies what `read` gives, and says whether it did.
export function copyButton(read) {
  const made = button("Copy", async () => {
    made.textContent = (await copy(read())) ? "Copied" : "Not copied";
    setTimeout(() => (made.textContent = "Copy"), 2000);
  });
  return made;
}

async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  // Browsers give a clipboard to https and to localhost only.
  const field = element("textarea", { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}
