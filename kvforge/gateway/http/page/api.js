// Calls to the server that the page came from. The key is in no storage: it goes with the page.

let key = "";

export function setKey(shown) {
  key = shown;
}

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

export function get(path) {
  return fetch(path, { cache: "no-store", headers: headers() });
}

// The events of a streamed answer, as objects. Throws an Error with the server's message.
export async function* events(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new Error(answer.error?.message ?? `the server answered with status ${response.status}`);
  }
  // What no guide keeps of the tools' schemas.
  yield { choices: [], unguided: response.headers.get("x-kvforge-unguided") };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      throw new Error("the server ended the answer before its end");
    }
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") {
        return;
      }
      const event = JSON.parse(data);
      if (event.error) {
        throw new Error(event.error.message);
      }
      yield event;
    }
  }
}
