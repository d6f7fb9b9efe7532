//! What graphics drivers find in the environment.

use std::env;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Where drivers look for a display server.
const RUNTIME: &str = "XDG_RUNTIME_DIR";
const DISPLAY: &str = "WAYLAND_DISPLAY";

/// A display server that doesn't exist.
const NO_DISPLAY: &str = "/nonexistent/wayland-0";

/// Keeps Mesa's Vulkan drivers from writing `error: XDG_RUNTIME_DIR is invalid or not set` to standard error
/// where there is no session, as over ssh, in containers and from cron: they look for a display whether or
/// not one is wanted, and are silent if it is named and isn't there.
///
/// The environment of a running program can't be changed safely, so this one begins again, as the same
/// process. If that fails, the driver has its say.
pub(crate) fn prepare() {
    if !complains(
        env::var_os(RUNTIME).as_deref(),
        env::var_os(DISPLAY).as_deref(),
    ) {
        return;
    }
    let Ok(program) = env::current_exe() else {
        return;
    };
    let mut command = Command::new(program);
    let mut args = env::args_os();
    if let Some(name) = args.next() {
        command.arg0(name);
    }
    // Returns only an error.
    let _ = command.args(args).env(DISPLAY, NO_DISPLAY).exec();
}

/// Whether drivers complain about these values of the two variables.
fn complains(runtime: Option<&OsStr>, display: Option<&OsStr>) -> bool {
    let is_absolute =
        |value: Option<&OsStr>| value.is_some_and(|value| Path::new(value).is_absolute());
    !is_absolute(runtime) && !is_absolute(display)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_complain_where_there_is_no_session() {
        for (runtime, display, expected) in [
            (None, None, true),
            (Some(""), None, true),
            (Some("relative"), Some("wayland-0"), true),
            (Some("/run/user/1000"), None, false),
            (None, Some(NO_DISPLAY), false),
        ] {
            let found = complains(runtime.map(OsStr::new), display.map(OsStr::new));
            assert_eq!(found, expected, "{runtime:?} {display:?}");
        }
    }
}
