//! `slackwater doctor`: what this host and its pools can and can't do.
//!
//! It looks, and changes nothing that lasts: scratch images of its own are attached to a loop
//! device, a file system of each kind is mounted on one, one of them is frozen, and all is taken
//! away again. A running driver isn't disturbed;
//! no lock of a pool is taken. Checks make [`Check`]s; only `Display` and JSON know how they look.

mod checksums;
mod freeze;
mod kernel;
mod pool;
mod trial;
mod udev;

use std::fmt;
use std::path::PathBuf;

pub use kernel::effective_capabilities;
use serde::Serialize;

use crate::host::{Freezer, Host};
use crate::model::PoolDefinition;

/// How good a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// As it should be.
    Ok,
    /// Works, with less than could be had, or can't be told.
    Warn,
    /// A pool, or everything, can't work.
    Fail,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// How good.
    pub level: CheckStatus,
    /// About what: "loop devices", "pool default".
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What would make it better; `None` where all is well.
    pub fix: Option<String>,
}

impl Check {
    fn ok(subject: impl Into<String>, found: impl Into<String>) -> Check {
        Check {
            level: CheckStatus::Ok,
            subject: subject.into(),
            found: found.into(),
            fix: None,
        }
    }

    fn warn(subject: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check {
            level: CheckStatus::Warn,
            fix: Some(fix.into()),
            ..Check::ok(subject, found)
        }
    }

    fn fail(subject: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Check {
        Check {
            level: CheckStatus::Fail,
            ..Check::warn(subject, found, fix)
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.level {
            CheckStatus::Ok => "ok  ",
            CheckStatus::Warn => "warn",
            CheckStatus::Fail => "FAIL",
        };
        write!(f, "{word}  {}: {}", self.subject, self.found)?;
        match &self.fix {
            Some(fix) => write!(f, " — {fix}"),
            None => Ok(()),
        }
    }
}

/// What to look at.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Configured pools.
    pub pools: Vec<PoolDefinition>,
    /// `--node-record`.
    pub node_record: PathBuf,
    /// `--state-dir`.
    pub state_dir: PathBuf,
    /// Where file systems and a freeze are tried. It doesn't exist: it is made, and removed again.
    pub trial_dir: PathBuf,
    /// `--allowed-path`.
    pub allowed_paths: Vec<PathBuf>,
    /// Directories in which programs are looked for.
    pub programs: Vec<PathBuf>,
}

/// Looks at everything, the machine first.
pub fn examine(host: &dyn Host, freezer: &dyn Freezer, patient: &Subject) -> Vec<Check> {
    let mut checks = kernel::examine(host, patient);
    let freezes = freeze::examine(host, freezer, patient);
    // In a folder that can't be used nothing is tried.
    if freezes.iter().all(|check| check.level != CheckStatus::Fail) {
        checks.extend(trial::examine(host, patient));
    }
    checks.extend(freezes);
    checks.extend(pool::examine(host, patient));
    checks
}

/// Whether a pool, or everything, can't work.
pub fn has_failures(checks: &[Check]) -> bool {
    checks.iter().any(|check| check.level == CheckStatus::Fail)
}

#[cfg(test)]
mod tests;
