// What a request says beside its text. An empty field is not sent, so the server's default holds.

import { byId } from "./dom.js";

const CHAT_ONLY = ["system", "tools"];
const fields = () => [...byId("settings").elements].filter(({ name }) => name);

export function startSettings(facts) {
  for (const field of fields().filter(({ name }) => name in facts.sampling)) {
    field.placeholder = facts.sampling[field.name];
  }
  byId("max-tokens").value = Math.min(1024, Math.ceil(facts.max_model_len / 4));
}

export const givenSettings = () => Object.fromEntries(fields().map(({ name, value }) => [name, value]));

export function fillSettings(values) {
  fields().forEach((field) => (field.value = values[field.name] ?? ""));
}

// The fields of a request; `system` is the first message. Throws an Error that says which field is wrong, and why.
export function requestFields(chats) {
  const body = {};
  for (const field of fields()) {
    field.removeAttribute("aria-invalid");
    const sent = chats || !CHAT_ONLY.includes(field.name);
    if (sent && (field.value || field.validity.badInput)) {
      Object.assign(body, { [field.name]: valueOf(field) });
    }
  }
  const { schema, ...others } = body;
  const format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return schema === undefined ? others : { ...others, response_format: format };
}

function valueOf(field) {
  const { name, type, value, validity } = field;
  try {
    if (type === "number") {
      if (!validity.valid) {
        throw new Error(field.validationMessage);
      }
      return field.valueAsNumber;
    } else if (name === "stop" && !value.trim().startsWith("[")) {
      return value.split("\n").filter(Boolean);
    }
    return name === "system" ? value : JSON.parse(value);
  } catch (error) {
    byId("settings-fold").open = true;
    field.setAttribute("aria-invalid", "true");
    field.focus();
    throw new Error(`${field.labels[0].textContent}: ${error.message}`);
  }
}
