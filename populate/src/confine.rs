//! Landlock: from here on this process opens nothing but its target, and what names and TLS need.
//!
//! The configuration, Secrets and the target are open already. What a bug in a parser could reach is
//! then the volume alone, which the source fills anyway.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus,
};
use serde::Deserialize;

use crate::failure::{Failure, Result};

/// The newest rights that are handled. Older kernels handle those that they know.
const ABI_VERSION: ABI = ABI::V5;

/// What getaddrinfo of glibc reads: its configuration, and the libraries that this names.
const FOR_NAMES: [&str; 12] = [
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ld.so.cache",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/run/systemd/resolve",
];

/// Whether an attempt goes on where the kernel has no Landlock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Confinement {
    #[default]
    Required,
    BestEffort,
}

/// Confines this process, and the threads that it starts later, to `folders`.
pub fn confine(folders: &[PathBuf], how: Confinement) -> Result<()> {
    let confined = restrict(folders).map_err(|error| error.to_string());
    let why = match confined {
        Ok(RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced) => return Ok(()),
        Ok(RulesetStatus::NotEnforced) => "the kernel has no Landlock".to_string(),
        Err(error) => error,
    };
    match how {
        Confinement::BestEffort => Ok(()),
        Confinement::Required => Err(Failure::refused(
            "NotConfined",
            format!("confine this process: {why}; `confinement: bestEffort` goes on without it"),
        )),
    }
}

fn restrict(folders: &[PathBuf]) -> std::result::Result<RulesetStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI_VERSION))?
        .create()?;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    for path in FOR_NAMES {
        rules = add(rules, Path::new(path), read)?;
    }
    // Everything but devices and sockets, which no archive may create.
    let all = AccessFs::from_all(ABI_VERSION);
    let refused = AccessFs::MakeChar
        | AccessFs::MakeBlock
        | AccessFs::MakeFifo
        | AccessFs::MakeSock
        | AccessFs::Execute
        | AccessFs::IoctlDev;
    for folder in folders {
        rules = add(rules, folder, all & !refused)?;
    }
    Ok(rules.restrict_self()?.ruleset)
}

/// Adds what exists. A file has no right of a folder.
fn add(
    rules: landlock::RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> std::result::Result<landlock::RulesetCreated, RulesetError> {
    let Ok(fd) = PathFd::new(path) else {
        return Ok(rules);
    };
    let access = match path.is_dir() {
        true => access,
        false => access & AccessFs::from_file(ABI_VERSION),
    };
    rules.add_rule(PathBeneath::new(fd, access))
}
