//! `slackwater doctor`: what this host and its pools support.
//!
//! It makes one lasting change: it records whether LVM ignores raw block volumes. Everything else is
//! temporary: images are attached to a loop device, a file system of each kind is mounted on one, one
//! of them is frozen, and everything is removed again. A running driver is not disturbed, and no pool is locked. The checks return [`Check`]s; only `Display` and
//! JSON define their format.

mod checksums;
mod freeze;
mod kernel;
mod lvm;
mod lvm_filter;
mod pool;
mod server;
mod trial;
mod udev;

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::host::{Freezer, Host};
use crate::model::PoolDefinition;

/// A pool with less free space than this gets a warning, earlier than the alert of the chart.
const LOW_SPACE_PERCENT: u64 = 10;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// Everything is in order.
    Ok,
    /// It works with a limitation, or the state is not known.
    Warn,
    /// A pool, or the whole driver, cannot work.
    Fail,
}

/// One result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub level: CheckStatus,
    /// What was checked: "loop devices", "pool default".
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What the user can do; `None` if everything is in order.
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

/// What to check.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Configured pools.
    pub pools: Vec<PoolDefinition>,
    pub node_record: PathBuf,
    pub state_dir: PathBuf,
    /// The directory in which file systems and a freeze are tried. It does not exist before; it is
    /// created, and removed again.
    pub trial_dir: PathBuf,
    pub allowed_paths: Vec<PathBuf>,
    /// Directories in which programs are searched for.
    pub programs: Vec<PathBuf>,
}

/// Runs all checks, those of the machine first.
pub fn examine(host: &dyn Host, freezer: &dyn Freezer, examined: &Subject) -> Vec<Check> {
    let mut checks = kernel::examine(host, examined);
    let freezes = freeze::examine(host, freezer, examined);
    // If the state directory cannot be used, nothing is tried in it.
    if freezes.iter().all(|check| check.level != CheckStatus::Fail) {
        checks.extend(trial::examine(host, examined));
    }
    checks.extend(freezes);
    checks.extend(pool::examine(host, examined));
    checks
}

/// Whether a pool, or the whole driver, cannot work.
pub fn has_failures(checks: &[Check]) -> bool {
    checks.iter().any(|check| check.level == CheckStatus::Fail)
}

#[cfg(test)]
mod tests;
