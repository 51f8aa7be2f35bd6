//! Plans a restore: the name, size, StorageClass and state of each claim that is created from a snapshot.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::{Value, json};

use super::source::Source;
use super::stateful_set::StatefulSet;
use super::stateful_set::claim_names::is_valid;
use crate::cli::RestoreArguments;
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result};
use crate::model::snapshot::Snapshot;
use crate::text::{as_quantity, quantity};
use crate::transfer::step::NamespacedName;

/// The annotation of a restored claim with the UID of the VolumeSnapshot of which it is a copy. A
/// command that is repeated recognizes the claims that it has created by it.
pub const RESTORED_FROM: &str = "slackwater.dev/restored-from";

/// The annotation by which the scheduler has a volume created.
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// What the names of claims begin with that are only there to be transferred; the UID of the snapshot
/// follows, so that a repeated command finds them.
pub const TEMPORARY: &str = "restore-";

/// The annotation of a claim that was created to be deleted after a check. No other claim is deleted.
const TO_BE_DISCARDED: &str = "slackwater.dev/discard";

/// The annotation of a claim that is only there to be transferred, with the claim that it becomes.
pub const BECOMES: &str = "slackwater.dev/restore-to";

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its claim does not exist yet.
    Planned,
    /// A claim that is no copy has its name. Only a dry run plans it.
    Blocked,
    /// Its claim was created by an earlier run.
    Exists,
    /// Its claim was created by this run.
    Created,
    /// Its volume exists, too.
    Bound,
    /// It was deleted after a check.
    Discarded,
}

/// A claim that is created from a snapshot.
#[derive(Clone, Debug)]
pub struct Copy {
    pub claim: String,
    pub snapshot: Snapshot,
    pub size_bytes: i64,
    /// Empty for the default class, if the user may not read which one it is.
    pub class: String,
    pub mode: String,
    pub access_modes: Vec<String>,
    pub state: State,
    /// The PersistentVolume, once there is one.
    pub volume: String,
    /// The UID of the claim; empty until it exists.
    pub uid: String,
    /// The claim of another namespace that it becomes, if it is only there to be transferred.
    pub target: Option<NamespacedName>,
    /// When an earlier run has created the claim.
    pub since: Option<Timestamp>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// Where the fields of a claim come from: another claim, a template, or the snapshot alone.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Pattern {
    request_bytes: i64,
    class: String,
    mode: String,
    access_modes: Vec<String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

fn texts(value: &Value) -> BTreeMap<String, String> {
    let each = value.as_object().into_iter().flatten();
    let each = each.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_string())));
    each.collect()
}

/// Of a claim or a template.
fn pattern(object: &Value) -> Pattern {
    let spec = &object["spec"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let modes = spec["accessModes"].as_array().into_iter().flatten();
    let request = text(&spec["resources"]["requests"]["storage"]);
    Pattern {
        request_bytes: quantity(&request).unwrap_or_default(),
        class: text(&spec["storageClassName"]),
        mode: text(&spec["volumeMode"]),
        access_modes: modes.map(text).collect(),
        labels: texts(&object["metadata"]["labels"]),
        annotations: texts(&object["metadata"]["annotations"]),
    }
}

/// Of what is known otherwise.
pub fn pattern_of(class: &str, mode: &str, access_modes: &[String]) -> Pattern {
    Pattern {
        class: class.into(),
        mode: mode.into(),
        access_modes: access_modes.to_vec(),
        ..Pattern::default()
    }
}

/// Of a PersistentVolume, which is like its claim.
pub fn pattern_of_volume(volume: &DynamicObject) -> Pattern {
    let spec = volume.at("/spec");
    pattern(&json!({"spec": {
        "accessModes": spec["accessModes"],
        "storageClassName": spec["storageClassName"],
        "volumeMode": spec["volumeMode"],
        "resources": {"requests": {"storage": spec["capacity"]["storage"]}},
    }}))
}

/// The claims that are created. Refuses names that cannot be, or that other claims have.
pub async fn copies(
    cluster: &Cluster,
    source: &Source,
    set: Option<&StatefulSet>,
    arguments: &RestoreArguments,
) -> Result<Vec<Copy>> {
    let names = names(source, set, arguments)?;
    let continues = arguments.suffix.is_none();
    let mut found = Vec::new();
    let mut in_the_way = Vec::new();
    for (at, (member, name)) in source.members.iter().zip(names).enumerate() {
        if !is_valid(&name) {
            return Err(Failure::usage(format!(
                "{name} cannot be the name of a claim: names have lowercase letters, digits, - and ., and at most 253 characters"
            )));
        }
        if let Some(namespace) = &arguments.to_namespace {
            let like = find_pattern(cluster, member, (set, false), at, source).await?;
            let claim = format!("{TEMPORARY}{}", member.uid);
            let copy = copy(claim, member, like, None, arguments)?;
            let namespace = namespace.clone();
            found.push(copy.with_target(NamespacedName { namespace, name }));
            continue;
        }
        let live = cluster.find_one(&object::CLAIM, &cluster.namespace, &name);
        let live = live.await?;
        if let Some(live) = live.as_ref().filter(|live| !is_copy(live, member)) {
            // The rest of the plan is checked before the user has to delete claims.
            if arguments.change.dry_run && !arguments.check.discard {
                let like = find_pattern(cluster, member, (set, continues), at, source).await?;
                let mut blocked = copy(name, member, like, None, arguments)?;
                blocked.state = State::Blocked;
                found.push(blocked);
                continue;
            }
            in_the_way.push(match live.metadata.deletion_timestamp {
                Some(_) => format!("{name} (being deleted)"),
                None => name,
            });
            continue;
        }
        if let Some(live) = &live {
            refuse_mark(live, arguments.check.discard)?;
        }
        let like = match &live {
            Some(live) => Some(pattern(&json!(live))),
            None => find_pattern(cluster, member, (set, continues), at, source).await?,
        };
        found.push(copy(name, member, like, live.as_ref(), arguments)?);
    }
    refuse_different_times(cluster, &found)?;
    match in_the_way.is_empty() {
        true => Ok(found),
        false => Err(Failure::failed(format!(
            "these claims of namespace {} exist: {}. A VolumeRevert puts them back in place (docs/reverts.md); give --suffix to create claims with other names, and docs/restore.md has the steps for new volumes under the same names",
            cluster.namespace,
            in_the_way.join(", ")
        ))),
    }
}

/// Refuses a copy that exists and is created or deleted for a check. One that a check has written to is
/// no copy of the snapshot any more, and one that an application uses must not be deleted.
fn refuse_mark(live: &DynamicObject, discard: bool) -> Result<()> {
    let is_marked = !live.annotation(TO_BE_DISCARDED).is_empty();
    let why = match (discard, is_marked) {
        (false, false) => return Ok(()),
        (false, true) => {
            "was created for a check, which may have changed it, to be deleted after it (--discard)"
        }
        (true, _) => "exists: a check with --discard is only of claims that it creates itself",
    };
    Err(Failure::failed(format!(
        "claim {}/{} {why}: give another --suffix",
        live.namespace(),
        live.name()
    )))
}

/// Refuses to create copies beside those that an application may have changed since an earlier run: they
/// would be of different times. A volume may have been used as soon as it exists.
fn refuse_different_times(cluster: &Cluster, copies: &[Copy]) -> Result<()> {
    let bound = copies.iter().filter(|copy| copy.state == State::Bound);
    let bound: Vec<_> = bound.map(|copy| copy.claim.as_str()).collect();
    let is_missing = |copy: &Copy| matches!(copy.state, State::Planned | State::Blocked);
    if bound.is_empty() || !copies.iter().any(is_missing) {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "these claims of namespace {} exist since an earlier restore, and an application may have changed their volumes: {}. The remaining claims would be from a different point in time: give another --suffix, or restore single members by the names of their VolumeSnapshots",
        cluster.namespace,
        bound.join(", ")
    )))
}

/// The names of the claims, in the order of the members.
fn names(
    source: &Source,
    set: Option<&StatefulSet>,
    arguments: &RestoreArguments,
) -> Result<Vec<String>> {
    let with_suffix = |name: &str| match &arguments.suffix {
        Some(suffix) => format!("{name}-{suffix}"),
        None => name.to_string(),
    };
    let Some(set) = set else {
        let names = source.members.iter().map(|one| with_suffix(one.base()));
        return Ok(names.collect());
    };
    let name = with_suffix(&set.set.name);
    let slots = set.slots(&source.members)?;
    Ok(slots
        .into_iter()
        .map(|slot| set.set.claim(&name, slot))
        .collect())
}

/// Whether a claim was created from exactly this snapshot, by this command.
pub fn is_copy(claim: &DynamicObject, member: &Snapshot) -> bool {
    !claim.is_being_deleted()
        && claim.annotation(RESTORED_FROM) == member.uid
        && !member.uid.is_empty()
        && claim.text("/spec/dataSource/name") == member.name
}

/// What a new claim is like: the claim of which the snapshot was taken, or the template. A claim with
/// which the StatefulSet continues has its labels, as if its controller had created it, and so is a member
/// of its group snapshots again. Other copies have none.
async fn find_pattern(
    cluster: &Cluster,
    member: &Snapshot,
    (set, continues): (Option<&StatefulSet>, bool),
    at: usize,
    source: &Source,
) -> Result<Option<Pattern>> {
    if !member.claim.is_empty() {
        let claim = cluster.find_one(&object::CLAIM, &cluster.namespace, &member.claim);
        if let Some(claim) = claim.await? {
            let mut like = pattern(&json!(claim));
            // What controllers have written about that volume.
            like.annotations.clear();
            // A selector of group snapshots would select the copy together with the original.
            like.labels.clear();
            return Ok(Some(like));
        }
    }
    let Some(set) = set else { return Ok(None) };
    let slot = set.slots(&source.members)?[at];
    let mut like = pattern(set.template(slot));
    match continues {
        true => like.labels.extend(texts(set.labels())),
        false => like.labels.clear(),
    }
    Ok(Some(like))
}

/// A claim that is created from a snapshot, like another one.
pub fn copy(
    claim: String,
    member: &Snapshot,
    like: Option<Pattern>,
    live: Option<&DynamicObject>,
    arguments: &RestoreArguments,
) -> Result<Copy> {
    let is_known = like.is_some();
    let mut like = like.unwrap_or_default();
    if let Some(class) = &arguments.storage_class {
        like.class.clone_from(class);
    }
    if like.access_modes.is_empty() {
        like.access_modes.push("ReadWriteOnce".into());
    }
    let or_default = |mode: &str| match mode {
        "" => "Filesystem".to_string(),
        mode => mode.into(),
    };
    let mode = match is_known {
        true => or_default(&like.mode),
        false => or_default(&member.mode),
    };
    if !member.mode.is_empty() && mode != member.mode {
        return Err(Failure::failed(format!(
            "VolumeSnapshot {}/{} is of a volume with volumeMode {}, and the claim {claim} would have {mode}",
            member.namespace, member.name, member.mode
        )));
    }
    like.annotations
        .insert(RESTORED_FROM.into(), member.uid.clone());
    if arguments.check.discard {
        like.annotations
            .insert(TO_BE_DISCARDED.into(), "true".into());
    }
    Ok(Copy {
        claim,
        snapshot: member.clone(),
        size_bytes: member.restore_bytes.max(like.request_bytes),
        class: like.class,
        mode,
        access_modes: like.access_modes,
        state: match live.map(|live| live.text("/status/phase")) {
            None => State::Planned,
            Some("Bound") => State::Bound,
            Some(_) => State::Exists,
        },
        volume: live.map_or("", |live| live.text("/spec/volumeName")).into(),
        uid: live
            .and_then(|live| live.metadata.uid.clone())
            .unwrap_or_default(),
        target: None,
        since: live.and_then(Fields::created),
        labels: like.labels,
        annotations: like.annotations,
    })
}

impl Copy {
    fn with_target(mut self, target: NamespacedName) -> Copy {
        self.annotations.insert(BECOMES.into(), target.to_string());
        self.target = Some(target);
        self
    }

    /// The claim, whose volume is created on this node, although no pod uses it.
    pub fn manifest_on(&self, node: Option<&str>) -> Value {
        let mut claim = self.manifest();
        if let Some(node) = node {
            claim["metadata"]["annotations"][SELECTED_NODE] = node.into();
        }
        claim
    }

    /// The claim as it is created.
    pub fn manifest(&self) -> Value {
        let mut claim = json!({
            "apiVersion": "v1",
            "kind": object::CLAIM.kind,
            "metadata": {"name": self.claim, "labels": self.labels, "annotations": self.annotations},
            "spec": {
                "accessModes": self.access_modes,
                "volumeMode": self.mode,
                "resources": {"requests": {"storage": as_quantity(self.size_bytes)}},
                "dataSource": {"apiGroup": object::SNAPSHOT.group, "kind": object::SNAPSHOT.kind,
                    "name": self.snapshot.name},
            },
        });
        if !self.class.is_empty() {
            claim["spec"]["storageClassName"] = json!(self.class);
        }
        claim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member() -> Snapshot {
        Snapshot {
            namespace: "shop".into(),
            name: "nightly-a".into(),
            claim: "data-pg-0".into(),
            uid: "uid-1".into(),
            restore_bytes: 10 << 30,
            ..Snapshot::default()
        }
    }

    fn arguments(words: &[&str]) -> RestoreArguments {
        use clap::Parser;
        let words = ["x", "restore", "nightly"].iter().chain(words);
        match crate::cli::Cli::parse_from(words).command {
            crate::cli::Command::Restore(arguments) => arguments,
            other => panic!("{other:?}"),
        }
    }

    fn claim(storage: &str) -> Pattern {
        pattern(&json!({"metadata": {"labels": {"app": "pg"}}, "spec": {
            "accessModes": ["ReadWriteOncePod"], "storageClassName": "fast", "volumeMode": "Block",
            "resources": {"requests": {"storage": storage}}}}))
    }

    #[test]
    fn a_copy_is_like_its_claim_and_never_smaller() {
        let of = |storage: &str, snapshot: &str| {
            let member = Snapshot {
                restore_bytes: quantity(snapshot).unwrap(),
                ..member()
            };
            let copy = copy(
                "x".into(),
                &member,
                Some(claim(storage)),
                None,
                &arguments(&[]),
            );
            copy.unwrap().manifest()
        };
        let made = of("10Gi", "10Gi");
        assert_eq!(made["spec"]["resources"]["requests"]["storage"], "10Gi");
        assert_eq!(made["spec"]["accessModes"], json!(["ReadWriteOncePod"]));
        assert_eq!(made["spec"]["volumeMode"], "Block");
        assert_eq!(made["spec"]["storageClassName"], "fast");
        assert_eq!(made["metadata"]["labels"], json!({"app": "pg"}));
        assert_eq!(
            made["metadata"]["annotations"],
            json!({RESTORED_FROM: "uid-1"})
        );
        assert_eq!(
            made["spec"]["dataSource"],
            json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "nightly-a"})
        );
        let sizes = ["1", "1Ki", "10Gi", "10Gi", "10737418241", "11Gi", "1.5e10"];
        for request in sizes {
            for snapshot in sizes {
                let made = of(request, snapshot);
                let size = made["spec"]["resources"]["requests"]["storage"]
                    .as_str()
                    .unwrap();
                let size = quantity(size).unwrap();
                let expected = quantity(request).max(quantity(snapshot)).unwrap();
                assert_eq!(size, expected, "{request} {snapshot}");
            }
        }
    }

    #[test]
    fn without_a_claim_the_snapshot_and_options_decide() {
        let bare = copy("x".into(), &member(), None, None, &arguments(&[]));
        assert_eq!(bare.unwrap().class, "", "the default one");
        let with_class = arguments(&["--storage-class", "slackwater"]);
        let block = Snapshot {
            mode: "Block".into(),
            ..member()
        };
        let copy = copy("x".into(), &block, None, None, &with_class).unwrap();
        assert_eq!(copy.mode, "Block");
        assert_eq!(copy.access_modes, ["ReadWriteOnce"]);
        assert_eq!(copy.class, "slackwater");
    }

    #[test]
    fn a_file_system_is_not_restored_as_a_device() {
        let file_system = Snapshot {
            mode: "Filesystem".into(),
            ..member()
        };
        let copied = copy(
            "x".into(),
            &file_system,
            Some(claim("1Gi")),
            None,
            &arguments(&[]),
        );
        let message = copied.unwrap_err().message;
        assert!(message.contains("volumeMode Filesystem"), "{message}");
    }

    #[test]
    fn only_a_claim_of_this_very_snapshot_is_its_copy() {
        let object = |annotation: &str, name: &str| -> DynamicObject {
            serde_json::from_value(json!({"metadata": {"name": "x", "annotations": {
                RESTORED_FROM: annotation}}, "spec": {"dataSource": {"name": name}}}))
            .unwrap()
        };
        assert!(is_copy(&object("uid-1", "nightly-a"), &member()));
        assert!(!is_copy(&object("uid-2", "nightly-a"), &member()));
        assert!(!is_copy(&object("uid-1", "nightly-b"), &member()));
        assert!(!is_copy(
            &object("", "nightly-a"),
            &Snapshot {
                uid: String::new(),
                ..member()
            }
        ));
        let mut leaving = object("uid-1", "nightly-a");
        leaving.metadata.deletion_timestamp =
            serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
        assert!(!is_copy(&leaving, &member()));
    }
}
