navigator.serviceWorker?.register('sw.js')
