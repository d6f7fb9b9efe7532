export const tests = {}
