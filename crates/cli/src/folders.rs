//! The folders that belong to this program: for settings and models on this machine.
//!
//! `STERNA_HOME` puts everything into one folder. Otherwise the system's conventions apply:
//! `XDG_CONFIG_HOME`, `XDG_DATA_HOME` and `XDG_CACHE_HOME` where they are set, `APPDATA` and `LOCALAPPDATA`
//! on Windows, `~/.config`, `~/.local/share` and `~/.cache` elsewhere.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The environment variable that names one folder for everything.
const HOME_VARIABLE: &str = "STERNA_HOME";

/// The folder for settings.
pub(crate) fn config() -> Result<PathBuf> {
    find("XDG_CONFIG_HOME", "APPDATA", ".config", &|name| {
        env::var_os(name).map(PathBuf::from)
    })
}

/// The folder for models.
pub(crate) fn data() -> Result<PathBuf> {
    Ok(own()?.join("store"))
}

/// The file with the messages of earlier chats.
pub(crate) fn history() -> Result<PathBuf> {
    Ok(own()?.join("history"))
}

/// The folder with notes of uploads under way.
#[cfg(feature = "stores")]
pub(crate) fn uploads() -> Result<PathBuf> {
    Ok(own()?.join("uploads"))
}

/// The file of peers that lied.
#[cfg(feature = "p2p")]
pub(crate) fn liars() -> Result<PathBuf> {
    Ok(own()?.join("peers.json"))
}

/// The file with the key that peers know this machine by.
#[cfg(feature = "p2p")]
pub(crate) fn peer_key() -> Result<PathBuf> {
    Ok(own()?.join("peer.key"))
}

/// The folder for what should be kept.
fn own() -> Result<PathBuf> {
    find("XDG_DATA_HOME", "LOCALAPPDATA", ".local/share", &|name| {
        env::var_os(name).map(PathBuf::from)
    })
}

/// The folder for compiled pipelines, which can be made again at any time.
#[cfg(feature = "gpu")]
pub(crate) fn pipelines() -> Result<PathBuf> {
    Ok(cache()?.join("pipelines"))
}

/// The folder for GPU measurements, which can be repeated.
#[cfg(feature = "gpu")]
pub(crate) fn tuning() -> Result<PathBuf> {
    Ok(cache()?.join("tuning"))
}

#[cfg(feature = "gpu")]
fn cache() -> Result<PathBuf> {
    find("XDG_CACHE_HOME", "LOCALAPPDATA", ".cache", &|name| {
        env::var_os(name).map(PathBuf::from)
    })
}

/// The path that `typed` means outside of a shell: `~/` is the home folder.
pub(crate) fn expanded(typed: &str) -> PathBuf {
    expanded_from(typed, env::home_dir())
}

fn expanded_from(typed: &str, home: Option<PathBuf>) -> PathBuf {
    match (typed.strip_prefix("~/"), home) {
        (Some(path), Some(home)) => home.join(path),
        _ => Path::new(typed).to_owned(),
    }
}

fn find(
    xdg: &str,
    windows: &str,
    under_home: &str,
    variable: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<PathBuf> {
    let set = |name: &str| variable(name).filter(|path| !path.as_os_str().is_empty());
    if let Some(home) = set(HOME_VARIABLE) {
        return Ok(home);
    }
    // By these conventions a relative path is ignored.
    (set(xdg).filter(|path| path.is_absolute()))
        .or_else(|| set(windows).filter(|_| cfg!(windows)))
        .or_else(|| env::home_dir().map(|home| home.join(under_home)))
        .map(|folder| folder.join("sterna"))
        .with_context(|| format!("no home folder is known; set {HOME_VARIABLE} to a folder"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tilde_is_the_home_folder() {
        let expanded = |typed| expanded_from(typed, Some("/home/me".into()));
        assert_eq!(expanded("~/a b"), PathBuf::from("/home/me/a b"));
        for typed in ["a/~/b", "~me/a", "/a"] {
            assert_eq!(expanded(typed), PathBuf::from(typed));
        }
    }

    #[test]
    fn one_variable_beats_the_customs() {
        let found = |set: &[(&str, &str)]| {
            let variable = |name: &str| {
                let value = set.iter().find(|(n, _)| *n == name);
                value.map(|(_, value)| PathBuf::from(value))
            };
            find("XDG_CONFIG_HOME", "APPDATA", ".config", &variable).unwrap()
        };
        let all = [("STERNA_HOME", "/s"), ("XDG_CONFIG_HOME", "/x")];
        assert_eq!(found(&all), PathBuf::from("/s"));
        let without = [("STERNA_HOME", ""), ("XDG_CONFIG_HOME", "/x")];
        assert_eq!(found(&without), PathBuf::from("/x/sterna"));
        assert!(found(&[("XDG_CONFIG_HOME", "relative")]).ends_with(".config/sterna"));
    }
}
