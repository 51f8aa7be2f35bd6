//! `slackwater frozen`: lists from the journal what is frozen for a cut, also while a driver is
//! running.

use std::path::Path;
use std::process::ExitCode;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::{Failure, host_with_guard, print};
use crate::cut::guard::GuardClient;
use crate::host::Freezer;
use crate::host::freezer::JournaledFreeze;

/// Lists the freezes in the journal. With `thaw`, everything is thawed, and the list shows what was
/// frozen; a running cut notices that, and fails.
pub(super) fn run(state_dir: &Path, thaw: bool, json: bool) -> Result<ExitCode, Failure> {
    let guard = GuardClient::new(
        host_with_guard(&[], &[], state_dir),
        state_dir.to_path_buf(),
    );
    if thaw {
        let volumes = guard.thaw_all().map_err(Failure::run)?;
        if json {
            print::json(&json!({ "thawed": volumes }));
        } else {
            let rows: Vec<_> = volumes.into_iter().map(|volume| [volume]).collect();
            print::table(["THAWED"], &rows);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let journaled = guard.list_journaled().map_err(Failure::run)?;
    if json {
        let rows: Vec<_> = journaled.iter().map(as_json).collect();
        print::json(&json!({ "frozen": rows }));
    } else {
        print::table(
            ["VOLUME", "DEVICE", "OWNER", "SINCE", "UNTIL", "STATE"],
            &journaled.iter().map(row).collect::<Vec<_>>(),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Which process thaws it: its owner and the guard, or the next sweep.
fn state(entry: &JournaledFreeze) -> &'static str {
    if entry.held { "held" } else { "orphaned" }
}

fn row(entry: &JournaledFreeze) -> [String; 6] {
    [
        entry.volume_id.clone(),
        entry.device.display().to_string(),
        entry.owner.to_string(),
        time(entry.since),
        time(entry.until),
        state(entry).into(),
    ]
}

fn as_json(entry: &JournaledFreeze) -> Value {
    json!({
        "volume": entry.volume_id, "device": entry.device, "owner_pid": entry.owner,
        "since": entry.since, "until": entry.until, "state": state(entry),
        "mapped": entry.mapped,
    })
}

/// Seconds since 1970 as date and time in UTC.
fn time(seconds: u64) -> String {
    let signed = i64::try_from(seconds).ok();
    let time = signed.and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.map_or_else(|| seconds.to_string(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_shown_as_people_write_them() {
        assert_eq!(time(0), "1970-01-01T00:00:00Z");
        assert_eq!(time(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(time(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(time(1_709_251_200), "2024-03-01T00:00:00Z");
        assert_eq!(time(4_102_444_799), "2099-12-31T23:59:59Z");
    }

    #[test]
    fn who_holds_it_is_said() {
        let mut entry = JournaledFreeze {
            volume_id: "p.v".into(),
            device: "/dev/loop7".into(),
            owner: 12,
            since: 60,
            until: 70,
            freezing: true,
            held: true,
            mapped: None,
        };
        assert_eq!(
            row(&entry),
            [
                "p.v",
                "/dev/loop7",
                "12",
                "1970-01-01T00:01:00Z",
                "1970-01-01T00:01:10Z",
                "held"
            ]
        );
        entry.held = false;
        let json = as_json(&entry);
        assert_eq!(
            json,
            json!({
                "volume": "p.v", "device": "/dev/loop7", "owner_pid": 12,
                "since": 60, "until": 70, "state": "orphaned",
                "mapped": null,
            })
        );
    }
}
