// Runs before the first paint, so that a chosen theme doesn't flash.
;(() => {
  try {
    const theme = localStorage.getItem('sterna-chat.theme')
    if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme
  } catch {
    // Storage is blocked: the system's theme.
  }
  // With `require-trusted-types-for`, scripts and Workers come from this origin, and no text becomes HTML.
  const { trustedTypes } = /** @type {any} */ (window)
  trustedTypes?.createPolicy('default', {
    createScriptURL: (/** @type {string} */ url) => {
      if (new URL(url, document.baseURI).origin !== location.origin) throw new TypeError(`${url} is of another origin.`)
      return url
    },
  })
})()
