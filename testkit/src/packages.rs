//! Programs of packages that are not installed, from the path or from the cache of `tests/packages/get`.

use std::path::PathBuf;

/// A program, if this machine has it. Otherwise `what` is left out.
pub fn find(program: &str, what: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("PACKAGES_CACHE").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(home()?.join(".cache/slackwater-packages")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(cache.map(|cache| cache.join("usr/bin")));
    let found = folders
        .map(|folder| folder.join(program))
        .find(|file| file.is_file());
    if found.is_none() {
        crate::left_out(&format!(
            "{what}: {program} is missing (make packages downloads it)"
        ));
    }
    found
}
