//! Tests of records that programs of two releases exchange: fields that the older one does not know
//! are kept.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use serde_json::json;

use super::*;
use crate::host::memory::{FaultMode, MemoryHost};

const PATH: &str = "/memory/record.json";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Known {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stage: Option<Stage>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    uses: Vec<Stage>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    shredded: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Stage {
    at: String,
}

impl Record for Known {
    const VERSION: u32 = 2;
    const WHAT: &'static str = "record of a test";

    fn written_version(&self) -> u32 {
        if self.shredded { 2 } else { 1 }
    }
}

/// The content of a file after this program has changed its record.
fn rewritten(before: Value, change: impl FnOnce(&mut Known)) -> Value {
    let host = MemoryHost::new();
    let path = Path::new(PATH);
    host.put_file(path, before.to_string().as_bytes()).unwrap();
    let mut record = load::<Known>(&host, path).unwrap().unwrap();
    change(&mut record);
    store(&host, path, &record).unwrap();
    serde_json::from_slice(&host.read_file(path).unwrap().unwrap()).unwrap()
}

#[test]
fn unknown_fields_are_kept_also_within_changed_objects() {
    let before = json!({
        "version": 1, "name": "a", "lineage": {"of": ["x", 1, null]},
        "stage": {"at": "/old", "by": "newer"},
        "uses": [{"at": "1", "why": "p"}, {"at": "2", "why": "q"}],
    });
    let after = rewritten(before, |record| {
        record.name = "b".into();
        record.stage.as_mut().unwrap().at = "/new".into();
    });
    let expected = json!({
        "version": 1, "name": "b", "lineage": {"of": ["x", 1, null]},
        "stage": {"at": "/new", "by": "newer"},
        "uses": [{"at": "1", "why": "p"}, {"at": "2", "why": "q"}],
    });
    assert_eq!(after, expected);
}

#[test]
fn a_field_that_this_program_removes_is_removed_with_its_content() {
    let before = json!({
        "version": 1, "name": "a",
        "stage": {"at": "/old", "by": "newer"},
        "uses": [{"at": "1", "why": "p"}, {"at": "2"}],
    });
    let after = rewritten(before, |record| {
        record.stage = None;
        record.uses.remove(0);
    });
    assert_eq!(
        after,
        json!({"version": 1, "name": "a", "uses": [{"at": "2"}]})
    );
}

#[test]
fn the_written_version_is_the_lowest_that_understands_the_record() {
    let before = json!({"version": 1, "name": "a"});
    assert_eq!(rewritten(before.clone(), |_| {})["version"], 1);
    let shredded = rewritten(before, |record| record.shredded = true);
    assert_eq!(shredded["version"], 2);
    assert_eq!(
        rewritten(shredded, |record| record.shredded = false)["version"],
        1
    );
}

#[test]
fn newer_and_damaged_records_are_never_replaced() {
    let host = MemoryHost::new();
    let path = Path::new(PATH);
    for text in [r#"{"version": 3, "name": "a"}"#, "{}", "not JSON"] {
        host.put_file(path, text.as_bytes()).unwrap();
        let refused = store(&host, path, &Known::default()).unwrap_err();
        assert!(matches!(refused, Error::Damaged { .. }), "{refused}");
        assert_eq!(host.read_file(path).unwrap().unwrap(), text.as_bytes());
    }
}

/// Records that exist on disks today have version 1, which is also what an earlier release reads.
#[test]
fn records_without_newer_meaning_are_written_for_the_first_release() {
    let node = NodeRecord::default();
    assert_eq!(value(&node).unwrap()["version"], 1);
}

/// Three records in directories of their own, which are new if there is no old record.
const TOGETHER: [&str; 3] = ["a", "b", "c"];

fn place(name: &str) -> PathBuf {
    Path::new("/memory/all").join(name).join("record.json")
}

/// The names in the records that can be read.
fn readable(host: &MemoryHost) -> Vec<Option<String>> {
    let read = |name: &str| load::<Known>(host, &place(name)).unwrap();
    let records = TOGETHER.into_iter().map(read);
    records.map(|record| Some(record?.name)).collect()
}

fn write_together(host: &MemoryHost, text: &str, parent: Option<&Path>) -> Result<()> {
    let record = Known {
        name: text.into(),
        ..Known::default()
    };
    let records = TOGETHER.map(|name| (place(name), &record));
    store_all(host, &records, parent)
}

/// A machine on which a write of records is cut off at its `n`-th effect, and whether it was. `before`
/// is the number of other effects before, which changes what a sync that is cut off makes durable.
fn cut_off(n: usize, mode: FaultMode, is_new: bool, before: usize) -> (MemoryHost, bool) {
    let host = MemoryHost::new();
    for _ in 0..before {
        let path = Path::new("/memory/other");
        host.perform(&Effect::MakeDir { path }).unwrap();
    }
    let all = Path::new("/memory/all");
    let make = |path: &Path| host.perform(&Effect::MakeDir { path }).map(drop).unwrap();
    make(all);
    let path = Path::new("/memory");
    host.perform(&Effect::SyncDir { path }).unwrap();
    TOGETHER.iter().for_each(|name| make(&all.join(name)));
    if !is_new {
        write_together(&host, "old", Some(all)).unwrap();
    }
    host.fail_effect(n, mode);
    let done = write_together(&host, "new", is_new.then_some(all));
    let is_cut_off = host.faults_left() == 0;
    assert_eq!(done.is_err(), is_cut_off);
    (host, is_cut_off)
}

#[test]
fn after_a_crash_each_of_several_records_is_the_old_or_the_new_one() {
    let mut seen = BTreeSet::new();
    for (is_new, before) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        for mode in [FaultMode::CrashBefore, FaultMode::CrashAfter] {
            for n in 1.. {
                let (host, is_cut_off) = cut_off(n, mode, is_new, before);
                let host = host.reboot(true);
                assert_eq!(host.violations(), [""; 0]);
                let old = (!is_new).then(|| "old".to_string());
                let new = Some("new".to_string());
                let found = readable(&host);
                assert!(found.iter().all(|one| [&old, &new].contains(&one)));
                if !is_cut_off {
                    assert_eq!(found, vec![new; 3], "all are durable at the end");
                    break;
                }
                let is_changed = |one: &Option<String>| one.as_deref() == Some("new");
                seen.insert(found.iter().filter(|one| is_changed(one)).count());
            }
        }
    }
    assert_eq!(seen, BTreeSet::from([0, 1, 2, 3]), "any number of them");
}

#[test]
fn a_record_that_can_be_read_after_a_crash_is_in_a_durable_directory() {
    for mode in [FaultMode::CrashBefore, FaultMode::CrashAfter] {
        for n in 1.. {
            let (host, is_cut_off) = cut_off(n, mode, true, 0);
            if !is_cut_off {
                break;
            }
            // The next process syncs the directory of a record before it relies on it.
            let host = host.restart_process();
            let found = readable(&host);
            for name in TOGETHER {
                let path = place(name);
                let path = path.parent().unwrap();
                host.perform(&Effect::SyncDir { path }).unwrap();
            }
            let host = host.reboot(true);
            assert_eq!(readable(&host), found, "{n} {mode:?}");
        }
    }
}
