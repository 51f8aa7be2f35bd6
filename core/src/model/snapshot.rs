//! The parameters of a VolumeSnapshotClass or VolumeGroupSnapshotClass, and the consistency level
//! of a snapshot.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::parameters::SIDECAR_PREFIX;
use crate::error::Error;

/// The consistency level of a cut. Levels are ordered from low to high.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The state after a power loss at this moment: each image at one point in time, without
    /// writing anything back first.
    Crash,
    /// File systems were frozen, or not mounted: the cut contains everything that was written
    /// before it, synced or not.
    #[default]
    Filesystem,
    /// Applications were quiesced as well.
    Application,
}

impl Level {
    /// The value in a class.
    pub fn as_str(self) -> &'static str {
        match self {
            Level::Crash => "crash",
            Level::Filesystem => "filesystem",
            Level::Application => "application",
        }
    }
}

impl Level {
    /// The level for a value in a class.
    pub fn parse(word: &str) -> Option<Level> {
        [Level::Filesystem, Level::Application, Level::Crash]
            .into_iter()
            .find(|level| level.as_str() == word)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What happens when quiesce hooks have failed in every attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnQuiesceFailure {
    /// No snapshot is taken.
    #[default]
    Fail,
    /// A snapshot of a lower level is taken.
    Degrade(Level),
}

/// Which hooks run when several pods use a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SharedVolume {
    /// The hooks of all pods.
    #[default]
    All,
    /// The hook of the first pod, ordered by name.
    One,
    /// No hook.
    Skip,
    /// The snapshot is refused.
    Fail,
}

/// How members of a group are deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Members {
    /// Only together with their group.
    #[default]
    Together,
    /// Also individually: they are cut together, and are ordinary snapshots afterwards.
    Independent,
}

/// The parameters of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotParameters {
    /// The requested level.
    pub consistency: Level,
    /// What to do if the level cannot be reached.
    pub on_quiesce_failure: OnQuiesceFailure,
    /// Maximum time from the first freeze to the last thaw.
    pub freeze_timeout: Duration,
    /// Maximum time until all hooks have written READY.
    pub quiesce_timeout: Duration,
    /// Attempts after the first one.
    pub retries: u32,
    /// Time between two attempts.
    pub retry_interval: Duration,
    /// Which hooks run for a volume that several pods use.
    pub shared_volume: SharedVolume,
    /// Images with more extents are refused before anything is frozen.
    pub max_extents: Option<u64>,
    /// For a group: how its members are deleted.
    pub members: Members,
    /// Once it is deleted, the snapshot stays as the hidden base of its volume.
    pub keep_base: bool,
    /// For a group: csi-snapshotter generated its name for a Kubernetes object, so every repeated
    /// call names the same volumes.
    pub is_of_object: bool,
    /// It is hidden, and is deleted once a clone on another node has its content.
    pub for_clone: bool,
}

impl Default for SnapshotParameters {
    fn default() -> SnapshotParameters {
        SnapshotParameters {
            consistency: Level::Filesystem,
            on_quiesce_failure: OnQuiesceFailure::Fail,
            freeze_timeout: Duration::from_secs(10),
            quiesce_timeout: Duration::from_secs(30),
            retries: 2,
            retry_interval: Duration::from_secs(5),
            shared_volume: SharedVolume::All,
            max_extents: None,
            members: Members::Together,
            keep_base: false,
            is_of_object: false,
            for_clone: false,
        }
    }
}

impl SnapshotParameters {
    /// The lowest level that this class accepts.
    pub fn least(&self) -> Level {
        match self.on_quiesce_failure {
            OnQuiesceFailure::Fail => self.consistency,
            OnQuiesceFailure::Degrade(lower) => lower.min(self.consistency),
        }
    }
}

/// All parameters as a class would contain them: equal parameters give equal text.
impl fmt::Display for SnapshotParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_failure = match self.on_quiesce_failure {
            OnQuiesceFailure::Fail => "fail",
            OnQuiesceFailure::Degrade(level) => level.as_str(),
        };
        let shared = match self.shared_volume {
            SharedVolume::All => "all",
            SharedVolume::One => "one",
            SharedVolume::Skip => "skip",
            SharedVolume::Fail => "fail",
        };
        write!(
            f,
            "consistency={} onQuiesceFailure={on_failure} freezeTimeout={}ms quiesceTimeout={}ms \
             retries={} retryInterval={}ms sharedVolume={shared}",
            self.consistency,
            self.freeze_timeout.as_millis(),
            self.quiesce_timeout.as_millis(),
            self.retries,
            self.retry_interval.as_millis(),
        )?;
        if let Some(most) = self.max_extents {
            write!(f, " maxExtents={most}")?;
        }
        // Printed only if it is not the default, because groups of earlier releases are compared by
        // this text.
        match self.members {
            Members::Together => {}
            Members::Independent => f.write_str(" members=independent")?,
        }
        match self.keep_base {
            true => f.write_str(" base=keep"),
            false => Ok(()),
        }
    }
}

/// Key that csi-snapshotter adds for the object of a group.
const GROUP_OBJECT: &str = "csi.storage.k8s.io/volumegroupsnapshot/name";

/// The longest `freezeTimeout`: longer than any application should be blocked, and far below the
/// kernel's hung-task timeout.
pub const MAX_FREEZE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longer than any sidecar waits for the whole call.
const MAX_QUIESCE_TIMEOUT: Duration = Duration::from_secs(600);
const MAX_RETRIES: u32 = 20;
const MAX_INTERVAL: Duration = Duration::from_secs(300);
const KNOWN: &str = "consistency, onQuiesceFailure, freezeTimeout, quiesceTimeout, retries, \
                     retryInterval, sharedVolume, maxExtents, base, members (of groups)";

impl SnapshotParameters {
    /// Parses the parameters of a class. `deletionPolicy` is a field of the class and not a
    /// parameter; it is ignored because this is a common mistake, and the second value reports
    /// whether it was present.
    pub fn parse<'a>(
        map: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<(SnapshotParameters, bool), Error> {
        let mut parsed = SnapshotParameters::default();
        let mut slip = false;
        let sorted: BTreeMap<_, _> = map.into_iter().collect();
        for (key, value) in sorted {
            match key.as_str() {
                "consistency" => parsed.consistency = consistency(value)?,
                "onQuiesceFailure" => parsed.on_quiesce_failure = on_quiesce_failure(value)?,
                "freezeTimeout" => {
                    parsed.freeze_timeout = duration(key, value, MAX_FREEZE_TIMEOUT)?;
                }
                "quiesceTimeout" => {
                    parsed.quiesce_timeout = duration(key, value, MAX_QUIESCE_TIMEOUT)?;
                }
                "retries" => {
                    parsed.retries = number(key, value, 0, u64::from(MAX_RETRIES))? as u32;
                }
                "retryInterval" => parsed.retry_interval = duration(key, value, MAX_INTERVAL)?,
                "sharedVolume" => parsed.shared_volume = shared_volume(value)?,
                "maxExtents" => parsed.max_extents = Some(number(key, value, 1, u64::MAX)?),
                "members" => parsed.members = members(value)?,
                "base" => parsed.keep_base = keep_base(value)?,
                "deletionPolicy" => slip = true,
                GROUP_OBJECT => parsed.is_of_object = true,
                _ if key.starts_with(SIDECAR_PREFIX) => {}
                _ => {
                    return Err(Error::invalid(
                        format!("parameters[{key:?}]"),
                        format!("is not a parameter of a snapshot class; known are {KNOWN}"),
                    ));
                }
            }
        }
        Ok((parsed, slip))
    }
}

fn bad(key: &str, value: &str, right: &str) -> Error {
    Error::invalid(
        format!("parameters.{key}"),
        format!("{value:?} is not valid; give {right}"),
    )
}

fn consistency(value: &str) -> Result<Level, Error> {
    Level::parse(value).ok_or_else(|| bad("consistency", value, "filesystem, application or crash"))
}

fn on_quiesce_failure(value: &str) -> Result<OnQuiesceFailure, Error> {
    match value {
        "fail" => Ok(OnQuiesceFailure::Fail),
        "filesystem" => Ok(OnQuiesceFailure::Degrade(Level::Filesystem)),
        "crash" => Ok(OnQuiesceFailure::Degrade(Level::Crash)),
        _ => Err(bad("onQuiesceFailure", value, "fail, filesystem or crash")),
    }
}

fn shared_volume(value: &str) -> Result<SharedVolume, Error> {
    match value {
        "all" => Ok(SharedVolume::All),
        "one" => Ok(SharedVolume::One),
        "skip" => Ok(SharedVolume::Skip),
        "fail" => Ok(SharedVolume::Fail),
        _ => Err(bad("sharedVolume", value, "all, one, skip or fail")),
    }
}

fn members(value: &str) -> Result<Members, Error> {
    match value {
        "together" => Ok(Members::Together),
        "independent" => Ok(Members::Independent),
        _ => Err(bad("members", value, "together or independent")),
    }
}

fn keep_base(value: &str) -> Result<bool, Error> {
    match value {
        "none" => Ok(false),
        "keep" => Ok(true),
        _ => Err(bad("base", value, "none or keep")),
    }
}

fn number(key: &str, value: &str, least: u64, most: u64) -> Result<u64, Error> {
    let plain = !value.is_empty() && value.bytes().all(|digit| digit.is_ascii_digit());
    let number = plain.then(|| value.parse().ok()).flatten();
    number
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| match most {
            u64::MAX => bad(key, value, &format!("a number of at least {least}")),
            _ => bad(key, value, &format!("a number from {least} to {most}")),
        })
}

/// Parses "500ms", "10s" or "2m"; the duration must not be zero.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok().filter(|number| *number > 0)?;
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_secs(number.checked_mul(60)?)),
        _ => None,
    }
}

fn duration(key: &str, value: &str, most: Duration) -> Result<Duration, Error> {
    parse_duration(value)
        .filter(|duration| *duration <= most)
        .ok_or_else(|| {
            let right = format!(
                "a time such as \"500ms\" or \"10s\", at most {}s",
                most.as_secs()
            );
            bad(key, value, &right)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn parse(pairs: &[(&str, &str)]) -> Result<(SnapshotParameters, bool), Error> {
        let map: HashMap<String, String> = pairs
            .iter()
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .collect();
        SnapshotParameters::parse(&map)
    }

    #[test]
    fn missing_parameters_have_defaults() {
        assert_eq!(parse(&[]).unwrap(), (SnapshotParameters::default(), false));
    }

    #[test]
    fn every_key_of_a_snapshot_class_is_accepted() {
        let (parsed, slip) = parse(&[
            ("consistency", "application"),
            ("onQuiesceFailure", "filesystem"),
            ("freezeTimeout", "500ms"),
            ("quiesceTimeout", "1m"),
            ("retries", "0"),
            ("retryInterval", "1s"),
            ("sharedVolume", "one"),
            ("maxExtents", "1000"),
            ("members", "independent"),
            ("base", "keep"),
            ("csi.storage.k8s.io/volumesnapshot/name", "x"),
            ("deletionPolicy", "Delete"),
        ])
        .unwrap();
        assert!(slip);
        let wanted = SnapshotParameters {
            consistency: Level::Application,
            on_quiesce_failure: OnQuiesceFailure::Degrade(Level::Filesystem),
            freeze_timeout: Duration::from_millis(500),
            quiesce_timeout: Duration::from_secs(60),
            retries: 0,
            retry_interval: Duration::from_secs(1),
            shared_volume: SharedVolume::One,
            max_extents: Some(1000),
            members: Members::Independent,
            keep_base: true,
            is_of_object: false,
            for_clone: false,
        };
        assert_eq!(parsed, wanted);
    }

    #[test]
    fn the_parameters_of_an_earlier_release_are_kept_unchanged() {
        let text = |pairs: &[(&str, &str)]| parse(pairs).unwrap().0.to_string();
        let before = "consistency=filesystem onQuiesceFailure=fail freezeTimeout=10000ms \
                      quiesceTimeout=30000ms retries=2 retryInterval=5000ms sharedVolume=all";
        assert_eq!(text(&[]), before);
        assert_eq!(text(&[("members", "together")]), before);
        let independent = text(&[("members", "independent")]);
        assert_eq!(independent, format!("{before} members=independent"));
        assert_eq!(text(&[("base", "none")]), before);
        assert_eq!(text(&[("base", "keep")]), format!("{before} base=keep"));
    }

    #[test]
    fn errors_name_the_mistake_and_the_allowed_values() {
        for (key, value, right) in [
            ("freezeTimeout", "31s", "at most 30s"),
            ("freezeTimeout", "0s", "at most 30s"),
            ("retries", "-1", "0 to 20"),
            ("consistency", "total", "crash"),
            ("maxExtents", "0", "at least 1"),
            ("members", "alone", "together or independent"),
            ("base", "true", "none or keep"),
            ("freezetimeout", "1s", "freezeTimeout"),
        ] {
            let text = parse(&[(key, value)]).unwrap_err().to_string();
            assert!(text.contains(key) && text.contains(right), "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_map_is_parsed_without_a_panic(given in prop::collection::hash_map("[a-zA-Z]{0,16}", any::<String>(), 0..6)) {
            let _ = SnapshotParameters::parse(&given);
        }

        #[test]
        fn any_text_is_a_duration_or_none(text in any::<String>()) {
            let _ = parse_duration(&text);
        }
    }
}
