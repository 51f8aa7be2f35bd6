//! The definition of a hook in the configuration.

use std::path::{Component, Path};
use std::time::Duration;

use serde::Deserialize;

use super::HookTarget;
use super::glob::Glob;
use crate::model::snapshot::parse_duration;

/// The default timeout of a session.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Like the limit of `quiesceTimeout`: longer than any sidecar waits for the whole call.
const MAX_TIMEOUT: Duration = Duration::from_secs(600);
/// Placeholder for the timeout in an argument.
const SECONDS: &str = "{seconds}";

/// A hook of this machine: for which volumes it is, and the program that quiesces their
/// application.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "HookParts")]
pub struct HookDefinition {
    /// Its unique name; the hooks of one volume are ordered by name.
    pub name: String,
    /// The absolute path of the program, and its arguments.
    pub command: Vec<String>,
    /// The user that runs it; by default the user of the driver.
    pub user: Option<String>,
    /// The volumes for which it is.
    pub selector: Selector,
    /// The session's own timeout: the program must write READY within it, and releases its
    /// application by itself when it expires.
    pub timeout: Duration,
}

/// A selection of volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// By the ID of the volume.
    Volume(Glob),
    /// By its PVC.
    Claim {
        /// The exact namespace.
        namespace: String,
        /// A pattern for the name of the PVC.
        name: Glob,
    },
}

impl Selector {
    /// Whether a volume is selected. A volume whose PVC is not known is not selected by any PVC.
    pub fn matches(&self, target: &HookTarget) -> bool {
        match self {
            Selector::Volume(glob) => glob.matches(&target.volume_id),
            Selector::Claim { namespace, name } => target
                .claim
                .as_deref()
                .and_then(|claim| claim.split_once('/'))
                .is_some_and(|(its, claim)| its == namespace && name.matches(claim)),
        }
    }
}

/// The parts of a hook's definition, not yet parsed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HookParts {
    pub name: String,
    /// Program and arguments.
    pub command: Vec<String>,
    /// The name of a user.
    pub user: Option<String>,
    /// A pattern for volume IDs.
    pub volume: Option<String>,
    /// "namespace/pattern" for PVCs.
    pub pvc: Option<String>,
    /// A duration such as "30s".
    pub timeout: Option<String>,
}

/// Checks the parts. The error is a sentence that names the part.
impl TryFrom<HookParts> for HookDefinition {
    type Error = String;

    fn try_from(parts: HookParts) -> Result<HookDefinition, String> {
        let name = &parts.name;
        check_name(name)?;
        let problem = |text: String| format!("hook {name}: {text}");
        check_command(&parts.command).map_err(problem)?;
        if parts
            .user
            .as_deref()
            .is_some_and(|user| user.is_empty() || has_control(user))
        {
            return Err(problem(
                "user is empty or contains a control character".into(),
            ));
        }
        let selector = selector(parts.volume.as_deref(), parts.pvc.as_deref()).map_err(problem)?;
        let timeout = timeout(parts.timeout.as_deref()).map_err(problem)?;
        Ok(HookDefinition {
            name: parts.name,
            command: parts.command,
            user: parts.user,
            selector,
            timeout,
        })
    }
}

impl HookDefinition {
    pub fn program(&self) -> &Path {
        Path::new(self.command.first().map_or("", String::as_str))
    }

    /// The timeout in whole seconds, rounded up.
    pub fn seconds(&self) -> u64 {
        seconds(self.timeout)
    }

    /// The arguments, with the timeout inserted.
    pub fn arguments(&self) -> Vec<String> {
        filled(self.command.get(1..).unwrap_or_default(), self.timeout)
    }
}

/// A timeout in whole seconds, rounded up.
fn seconds(timeout: Duration) -> u64 {
    timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0)
}

/// Inserts the timeout into arguments.
pub(super) fn filled(words: &[String], timeout: Duration) -> Vec<String> {
    let seconds = seconds(timeout).to_string();
    let each = words.iter();
    each.map(|word| word.replace(SECONDS, &seconds)).collect()
}

fn has_control(text: &str) -> bool {
    text.chars().any(char::is_control)
}

fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
    if (1..=63).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    Err(format!(
        "hook: name {name:?} is not valid; give 1 to 63 letters, digits, '-', '.' and '_'"
    ))
}

fn check_command(command: &[String]) -> Result<(), String> {
    let Some(program) = command.first() else {
        return Err("command is empty; give the program and its arguments".into());
    };
    let path = Path::new(program);
    let is_plain = path.components().all(|part| part != Component::ParentDir);
    if !path.is_absolute() || !is_plain || path.file_name().is_none() {
        return Err(format!(
            "command starts with {program:?}; give the absolute path of the program, without \"..\""
        ));
    }
    if command.iter().any(|word| word.contains('\0')) {
        return Err("command contains a zero byte".into());
    }
    Ok(())
}

fn selector(volume: Option<&str>, pvc: Option<&str>) -> Result<Selector, String> {
    match (volume, pvc) {
        (Some(""), None) => Err("volume is empty; give a pattern of IDs, or \"*\"".into()),
        (Some(glob), None) => Ok(Selector::Volume(Glob::new(glob))),
        (None, Some(pvc)) => match pvc.split_once('/') {
            Some((namespace, name))
                if !namespace.is_empty()
                    && !name.is_empty()
                    && !name.contains('/')
                    && !namespace.contains(['*', '?']) =>
            {
                Ok(Selector::Claim {
                    namespace: namespace.into(),
                    name: Glob::new(name),
                })
            }
            Some(_) | None => Err(format!(
                "pvc {pvc:?} is not NAMESPACE/PATTERN; give a namespace without wildcards, and a name that may contain '*' and '?'"
            )),
        },
        (None, None) => {
            Err("neither volume nor pvc selects the hook's volumes; give one of them".into())
        }
        (Some(_), Some(_)) => Err("both volume and pvc are given; give one of them".into()),
    }
}

/// Parses a session's timeout; returns the default if there is none.
pub(super) fn timeout(text: Option<&str>) -> Result<Duration, String> {
    let Some(text) = text else {
        return Ok(TIMEOUT);
    };
    let parsed = parse_duration(text).filter(|timeout| *timeout <= MAX_TIMEOUT);
    parsed.ok_or_else(|| {
        format!(
            "timeout {text:?} is not valid; give a duration such as \"30s\", at most {}s",
            MAX_TIMEOUT.as_secs()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> HookParts {
        HookParts {
            name: "orders-db".into(),
            command: vec!["/bin/hold".into(), "--for={seconds}s".into(), "{x}".into()],
            pvc: Some("shop/db-*".into()),
            ..HookParts::default()
        }
    }

    fn with(change: impl FnOnce(&mut HookParts)) -> Result<HookDefinition, String> {
        let mut changed = parts();
        change(&mut changed);
        HookDefinition::try_from(changed)
    }

    fn target(id: &str, claim: Option<&str>) -> HookTarget {
        HookTarget {
            volume_id: id.into(),
            claim: claim.map(Into::into),
            node: None,
        }
    }

    #[test]
    fn a_hook_has_its_defaults_and_its_deadline_in_its_arguments() {
        let hook = HookDefinition::try_from(parts()).unwrap();
        assert_eq!(hook.timeout, Duration::from_secs(30));
        assert_eq!(hook.user, None);
        assert_eq!(hook.program(), Path::new("/bin/hold"));
        assert_eq!(hook.arguments(), ["--for=30s", "{x}"]);
        let short = with(|hook| hook.timeout = Some("1500ms".into())).unwrap();
        assert_eq!(short.arguments()[0], "--for=2s", "rounded up");
    }

    #[test]
    fn what_is_wrong_is_one_sentence_that_names_the_part() {
        type Change = fn(&mut HookParts);
        let wrong: [(Change, &str); 15] = [
            (|hook| hook.name.clear(), "name \"\""),
            (|hook| hook.name = "a b".into(), "name \"a b\""),
            (
                |hook| hook.command.clear(),
                "hook orders-db: command is empty",
            ),
            (|hook| hook.command = vec!["psql".into()], "absolute path"),
            (|hook| hook.command = vec!["/".into()], "absolute path"),
            (
                |hook| hook.command = vec!["/a/../b".into()],
                "absolute path",
            ),
            (|hook| hook.command.push("a\0".into()), "zero byte"),
            (|hook| hook.user = Some(String::new()), "user is empty"),
            (|hook| hook.pvc = None, "neither volume nor pvc"),
            (|hook| hook.volume = Some("*".into()), "both volume and pvc"),
            (|hook| hook.pvc = Some("db".into()), "NAMESPACE/PATTERN"),
            (|hook| hook.pvc = Some("*/db".into()), "NAMESPACE/PATTERN"),
            (|hook| hook.pvc = Some("a/b/c".into()), "NAMESPACE/PATTERN"),
            (|hook| hook.timeout = Some("0s".into()), "timeout \"0s\""),
            (|hook| hook.timeout = Some("601s".into()), "at most 600s"),
        ];
        for (change, words) in wrong {
            let error = with(change).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let none = with(|hook| (hook.pvc, hook.volume) = (None, Some(String::new())));
        assert!(none.unwrap_err().contains("volume is empty"));
    }

    #[test]
    fn volumes_are_chosen_by_id_or_by_claim() {
        let by_claim = HookDefinition::try_from(parts()).unwrap().selector;
        assert!(by_claim.matches(&target("x", Some("shop/db-0"))));
        assert!(!by_claim.matches(&target("x", Some("shop2/db-0"))));
        assert!(!by_claim.matches(&target("x", Some("shop/web-0"))));
        assert!(!by_claim.matches(&target("shop/db-0", None)));
        let by_id = Selector::Volume(Glob::new("5f0c*.8a*"));
        assert!(by_id.matches(&target("5f0c11.8a22", None)));
        assert!(!by_id.matches(&target("5f0c11.9a22", None)));
    }
}
