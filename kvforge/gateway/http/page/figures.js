// How numbers are written, the same on the live board and below answers.

export const seconds = (value) => `${value.toFixed(value < 1 ? 3 : 2)} s`;
export const rate = (tokens, milliseconds) => (tokens * 1000) / milliseconds;
export const whole = (value) => value.toFixed(0);

// What is said below an answer. Its rate is the board's: tokens over the time in which they came, those of the first
// event left out, because the time before them is the time to first token.
export function summary({ asked, first, last, firstTokens, tokens, usage, reason, unguided }) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out`);
  }
  if (first) {
    parts.push(`time to first token ${seconds((first - asked) / 1000)}`);
  }
  if (tokens > firstTokens) {
    parts.push(`${whole(rate(tokens - firstTokens, last - first))} tokens/s`);
  }
  const notes = [reason === "length" && "cut off at max tokens", unguided && `left to the model: ${unguided}`];
  return [...parts, ...notes.filter(Boolean)].join(" · ");
}
