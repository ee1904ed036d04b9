// A conversation: its entries in order, the settings that it is asked with, and the forms in which others read it.

export const NAMES = { user: "You", assistant: "Model", tool: "Result", completion: "Completion", error: "Error" };

export function newConversation(settings) {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", at: Date.now(), settings, entries: [] };
}

export function titleOf({ title, entries }) {
  const begins = entries[0] ? (entries[0].prompt ?? entries[0].content) : "";
  return title || begins.trim().replace(/\n[^]*/, "").replace(/^(.{36}\S*)[^]+/, "$1 …") || "New conversation";
}

// As the API takes them; errors, and answers that say nothing, are none.
export function messagesOf({ entries }, system) {
  const first = system ? [{ role: "system", content: system }] : [];
  return [...first, ...entries.flatMap(message)];
}

function message({ role, content, reasoning, calls = [], id }) {
  if (role === "assistant" && (content || calls.length)) {
    const thought = reasoning ? { reasoning_content: reasoning } : {};
    return [{ role, content, ...thought, ...(calls.length ? { tool_calls: calls } : {}) }];
  }
  return role === "user" ? [{ role, content }] : role === "tool" ? [{ role, tool_call_id: id, content }] : [];
}

// The calls of the last answer that have no result yet.
export function openCalls({ entries }) {
  const last = entries[entries.length - 1];
  return last?.role === "assistant" ? (last.calls ?? []) : [];
}

export function asJson(model, conversation) {
  const messages = messagesOf(conversation, conversation.settings.system);
  return JSON.stringify({ model, messages, ...conversation }, null, 2);
}

export function asMarkdown(conversation) {
  const fence = (text, language) => `~~~~~~${language}\n${text}\n~~~~~~`;
  const parts = conversation.entries.map(({ role, name, content, prompt, reasoning, calls = [], figures }) =>
    [
      `## ${NAMES[role]}${name ? ` of ${name}` : ""}`,
      reasoning && reasoning.trim().replace(/^/gm, "> "),
      role === "tool" ? fence(content, "") : (prompt ?? "") + content,
      ...calls.map((call) => fence(call.function.arguments, call.function.name)),
      figures && `*${figures}*`,
    ].filter(Boolean).join("\n\n"),
  );
  const system = conversation.settings.system;
  return [`# ${titleOf(conversation)}`, ...(system ? [`## System\n\n${system}`] : []), ...parts].join("\n\n") + "\n";
}
