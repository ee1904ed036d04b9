// One streamed answer: its text, reasoning, calls and figures are written into an entry as they come.

import { events } from "./api.js";
import { summary } from "./figures.js";

const PERIOD_MS = 250;

// `grew` is called at most once in a period, and at the end. Throws what ended the answer before its end.
export async function answer(path, body, entry, signal, grew) {
  const times = { asked: performance.now(), first: 0, last: 0, firstTokens: 0, tokens: 0, usage: null, reason: "" };
  let timer = 0;
  const show = () => {
    timer = 0;
    entry.figures = summary(times);
    grew();
  };
  try {
    for await (const event of events(path, body, signal)) {
      take(event, entry, times);
      timer ||= setTimeout(show, PERIOD_MS);
    }
  } finally {
    clearTimeout(timer);
    show();
  }
}

function take({ usage, unguided, choices: [choice] }, entry, times) {
  times.usage = usage ?? times.usage;
  times.unguided ??= unguided;
  if (!choice) {
    return;
  }
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens > times.tokens) {
    Object.assign(times, { last: performance.now(), tokens });
    times.first ||= times.last;
    times.firstTokens ||= tokens;
  }
  times.reason = choice.finish_reason ?? times.reason;
  const delta = choice.delta ?? { content: choice.text };
  entry.content += delta.content ?? "";
  entry.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    entry.calls[index] ??= { id, type: "function", function: { name: part.name, arguments: "" } };
    entry.calls[index].function.arguments += part.arguments ?? "";
  }
}
