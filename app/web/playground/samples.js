// Long documents with one fact hidden in each, and a question about it at the end.

export const SAMPLES = [
  { file: "tide-station.txt", title: "Handbook of a tide station", maxNewTokens: 24 },
  { file: "bread-oven.txt", title: "Manual of a bread oven", maxNewTokens: 24 },
  { file: "winter-log.txt", title: "Winter log of a mountain hut", maxNewTokens: 24 },
];
