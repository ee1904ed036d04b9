// What an entry of a conversation looks like.

import { NAMES } from "./conversation.js";
import { button, byId, copyButton, element } from "./dom.js";
import { showMarkdown } from "./markdown.js";

// An entry's node with the buttons of `acts`, a table of words and functions; its `update` shows what has changed.
export function view(entry, acts) {
  const { role, name } = entry;
  const who = NAMES[role] + (name ? ` of ${name}` : "");
  const said = element("div", { className: "said" });
  const figures = element("div", { className: "note" });
  const calls = element("div");
  const thought = element("div", { className: "plain" });
  const fold = element("details", { className: "thought" }, element("summary", {}, "Reasoning"), thought);
  const buttons = Object.entries(acts).map(([words, act]) => button(words, act));
  const copied = role === "assistant" || role === "completion";
  const all = [...(copied ? [copyButton(() => (entry.prompt ?? "") + entry.content)] : []), ...buttons];
  const title = element("div", { className: "who" }, who);
  const node = element("article", { className: role, ariaLabel: who }, title, fold, said, calls, figures);
  if (all.length) {
    node.append(element("div", { className: "row acts" }, ...all));
  }
  const update = () => {
    fold.hidden = !entry.reasoning;
    thought.textContent = entry.reasoning ?? "";
    figures.textContent = entry.figures ?? "";
    calls.replaceChildren(...(entry.calls ?? []).map(call));
    if (role === "assistant") {
      showMarkdown(said, entry.content);
    } else {
      const given = element("span", { className: "given" }, entry.prompt ?? "");
      said.classList.add("plain");
      said.replaceChildren(...(entry.prompt ? [given] : []), entry.content);
    }
  };
  update();
  return { node, said, update };
}

function call({ function: { name, arguments: given } }) {
  return element("div", { className: "call" }, element("code", {}, `${name}(${pretty(given)})`));
}

function pretty(given) {
  try {
    return JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    return given; // not whole yet, or cut off
  }
}

// A form in place of what was said: `send` gets the text.
export function editForm(said, text, send) {
  const field = element("textarea", { value: text, rows: 3, ariaLabel: "Edit the message" });
  const form = element("form", { className: "edit" }, field);
  const cancel = () => {
    form.replaceWith(said);
    byId("text").focus();
  };
  form.append(element("div", { className: "row" }, element("button", {}, "Send from here"), button("Cancel", cancel)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) {
      send(field.value);
    }
  });
  form.addEventListener("keydown", (event) => event.key === "Escape" && cancel());
  sendByEnter(field);
  said.replaceWith(form);
  field.focus();
}

// A field for each call's result; `send` gets them in order.
export function resultForm(calls, send) {
  const fields = calls.map(() => element("textarea", { rows: 2, required: true }));
  const labels = calls.map(({ function: { name } }, index) =>
    element("label", {}, `Result of ${name}`, fields[index]),
  );
  const form = element("form", { className: "results edit" }, ...labels, element("button", {}, "Continue"));
  fields.forEach(sendByEnter);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(fields.map(({ value }) => value));
  });
  return form;
}

export function sendByEnter(field) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      field.form.requestSubmit();
    }
  });
}
