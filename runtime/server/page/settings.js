// What a conversation asks for. Everything is kept as it was typed, and is left to the server where nothing was.
import { make } from "./dom.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, hint: "0 is greedy" },
  { name: "top_p", label: "Top-p", min: 0, max: 1 },
  { name: "top_k", label: "Top-k", min: 0, whole: true, hint: "0 is all" },
  { name: "min_p", label: "Min-p", min: 0, max: 1 },
  { name: "max_tokens", label: "Max tokens", min: 1, whole: true },
  { name: "seed", label: "Seed", min: 0, whole: true },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, hint: "1 is off" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2 },
];

const OWN = ["model", "messages", "stream", "stream_options"]; // what the page says itself

export const NO_SETTINGS = { model: "", system: "", numbers: {}, stop: "", more: "" };

/** Build the fields of NUMBERS; a value out of its range says so when its field is left. */
export function makeNumbers(container) {
  for (const number of NUMBERS) {
    const hint = make("small", { id: `hint-${number.name}` }, describe(number));
    const input = make("input", {
      name: number.name,
      inputmode: number.whole ? "numeric" : "decimal",
      placeholder: "server’s",
      "aria-describedby": hint.id,
      input: () => input.setAttribute("aria-invalid", !isValid(number, input.value)),
    });
    container.append(make("label", {}, number.label, input, hint));
  }
}

function describe({ min, max, whole, hint }) {
  const range = max === undefined ? `${min} or more` : `${min} to ${max}`;
  return [range, hint].filter(Boolean).join(", ");
}

function isValid({ min, max = Number.MAX_SAFE_INTEGER, whole }, text) {
  const value = Number(text);
  return !text.trim() || (value >= min && value <= max && (!whole || Number.isSafeInteger(value)));
}

export function showSettings(form, settings) {
  for (const name of ["system", "stop", "more"]) form.elements[name].value = settings[name];
  for (const { name } of NUMBERS) {
    form.elements[name].value = settings.numbers[name] ?? "";
    form.elements[name].removeAttribute("aria-invalid");
  }
}

export function readSettings(form, model) {
  const value = (name) => form.elements[name].value;
  const numbers = Object.fromEntries(NUMBERS.map(({ name }) => [name, value(name).trim()]).filter(([, text]) => text));
  return { model, system: value("system"), numbers, stop: value("stop"), more: value("more") };
}

/** The settings as parameters of a request; one that is out of its range is an Error that names it. */
export function toParameters(settings) {
  const parameters = {};
  for (const number of NUMBERS) {
    const text = settings.numbers[number.name];
    if (!text) continue;
    if (!isValid(number, text)) throw new Error(`${number.label} is ${text}; expected a ${number.whole ? "whole " : ""}number, ${describe(number)}.`);
    parameters[number.name] = Number(text);
  }
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) parameters.stop = stop;
  return { ...parameters, ...readMore(settings.more) };
}

function readMore(text) {
  if (!text.trim()) return {};
  let more;
  try {
    more = JSON.parse(text);
  } catch (error) {
    throw new Error(`“Anything else” is not JSON: ${error.message}.`);
  }
  if (more === null || typeof more !== "object" || Array.isArray(more)) {
    throw new Error("“Anything else” is not a JSON object; expected such as {\"tools\": []}.");
  }
  const own = OWN.find((name) => name in more);
  if (own) throw new Error(`“Anything else” holds ${own}, which the page sets itself; take it out.`);
  return more;
}
