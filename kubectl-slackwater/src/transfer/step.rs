//! The steps of a claim to another namespace. The next one is decided from what exists and from nothing
//! else, so a command that was interrupted anywhere is completed by the next one.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A claim by its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespacedName {
    pub namespace: String,
    pub name: String,
}

impl std::fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// What the PersistentVolume records, in an annotation, from the first step to the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The claim that is deleted.
    pub from: NamespacedName,
    pub uid: String,
    /// The claim that is created.
    pub to: NamespacedName,
    /// The reclaim policy before the transfer.
    pub policy: String,
    /// The new claim as it is created.
    pub claim: Value,
    /// The transfer is being undone: the version of the PersistentVolume when this began, which no other
    /// attempt has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undo: Option<String>,
}

/// The PersistentVolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its reclaim policy.
    pub policy: String,
    /// What it records.
    pub record: Option<Record>,
    /// The claim that it belongs to, and its UID; empty while it is only reserved.
    pub claim: Option<(NamespacedName, String)>,
    pub is_being_deleted: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    pub uid: String,
    /// It names this PersistentVolume.
    pub is_of_volume: bool,
    pub is_bound: bool,
    pub is_being_deleted: bool,
    /// A transfer of the old claim has created it.
    pub is_transferred: bool,
    /// The attempt to undo its transfer that has reached it; empty for none.
    pub undone: String,
}

/// What exists, as far as the decision needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The PersistentVolume.
    pub volume: Option<Volume>,
    /// The claim in the namespace that it leaves.
    pub old: Option<Claim>,
    /// The claim in the other namespace.
    pub new: Option<Claim>,
    /// Why the old claim cannot be deleted now: a pod uses it, for example.
    pub blocker: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The PersistentVolume gets the record and the policy Retain, in one write.
    Record,
    /// It gets the policy Retain again, because another user has changed it.
    Retain,
    /// The old claim is deleted: exactly that of the recorded UID.
    Delete,
    /// The PersistentVolume is reserved for the new claim.
    Reserve,
    /// The new claim is created.
    Create,
    /// The PersistentVolume gets back its policy and loses the record, in one write.
    Restore,
    /// The record gets the mark that the transfer is being undone.
    Mark,
    /// The old claim gets the mark of this attempt, and so another version: a run that has decided to
    /// delete it before the record was marked does not find it any more.
    Keep,
    /// The new claim, which is not bound, is deleted: exactly the one that was read.
    Withdraw,
    /// The PersistentVolume is reserved for the old claim.
    GiveBack,
    /// The old claim is created again.
    Recreate,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// This.
    Step(Step),
    /// Nothing, until a controller of Kubernetes has done this.
    Wait(&'static str),
    /// Nothing, for this reason.
    Refused(String),
    /// Nothing any more.
    Done,
}

/// The PersistentVolume, or why nothing can be done with it.
pub fn get_volume(view: &View) -> Result<&Volume, Next> {
    match &view.volume {
        Some(volume) if volume.is_being_deleted => Err("its PersistentVolume is being deleted"),
        Some(volume) => Ok(volume),
        None => Err("its PersistentVolume was deleted by another user"),
    }
    .map_err(|why| Next::Refused(why.into()))
}

/// Decides the next step.
pub fn next(from: &NamespacedName, to: &NamespacedName, view: &View) -> Next {
    let refuse = |why: String| Next::Refused(why);
    let volume = match get_volume(view) {
        Ok(volume) => volume,
        Err(refused) => return refused,
    };
    let Some(record) = &volume.record else {
        return next_without_record(from, to, volume, view);
    };
    if record.from != *from || record.to != *to {
        return refuse(format!(
            "its PersistentVolume records a transfer from {} to {}: complete that one first",
            record.from, record.to
        ));
    }
    if is_new_claims(volume, to, view) {
        return Next::Step(Step::Restore);
    }
    if record.undo.is_some() {
        return refuse(format!(
            "its transfer to {} is being undone: `kubectl slackwater transfer {} -n {} --undo` completes this",
            record.to, from.name, from.namespace
        ));
    }
    if volume.policy != "Retain" {
        return Next::Step(Step::Retain);
    }
    let old = view.old.as_ref().filter(|old| old.uid == record.uid);
    if old.is_some_and(|old| old.is_being_deleted) {
        return Next::Wait("the old claim is being deleted");
    }
    if let Some(why) = find_new_claim_blocker(to, view) {
        return refuse(why);
    }
    if let Some(old) = old {
        if !old.is_of_volume || !is_bound_to(volume, &old.uid) {
            return refuse(format!("claim {from} is not bound to its PersistentVolume"));
        }
        return match &view.blocker {
            Some(why) => refuse(why.clone()),
            None => Next::Step(Step::Delete),
        };
    }
    let reserved = match &volume.claim {
        Some((place, uid)) if place == to => {
            uid.is_empty() || view.new.as_ref().is_some_and(|new| new.uid == *uid)
        }
        // Of the old claim, which is gone; or of the new one, which was deleted after it was bound.
        _ => false,
    };
    match (reserved, &view.new) {
        (false, _) if !can_reserve(volume, record) => refuse(
            "its PersistentVolume belongs to another claim, because of a change by another user"
                .into(),
        ),
        (false, _) => Next::Step(Step::Reserve),
        (true, None) => Next::Step(Step::Create),
        (true, Some(_)) => Next::Wait("the new claim is being bound"),
    }
}

/// Why the claim in the other namespace cannot become the new one. It may have data of its own, so its
/// deletion is never proposed.
fn find_new_claim_blocker(to: &NamespacedName, view: &View) -> Option<String> {
    let new = view.new.as_ref()?;
    if !new.is_of_volume {
        return Some(format!(
            "claim {to} exists, and is not bound to the PersistentVolume, which stays Retain with the record of the transfer. With --undo the transfer is given up, and can be repeated under another name"
        ));
    }
    new.is_being_deleted
        .then(|| format!("claim {to} is being deleted by another user"))
}

/// The volume belongs to the claim of this UID.
fn is_bound_to(volume: &Volume, uid: &str) -> bool {
    volume.claim.as_ref().is_some_and(|(_, own)| own == uid)
}

/// The new claim is bound to the volume, and the volume to exactly this claim.
pub fn is_new_claims(volume: &Volume, to: &NamespacedName, view: &View) -> bool {
    let Some(new) = &view.new else { return false };
    let claim = volume.claim.as_ref();
    let is_its = claim.is_some_and(|(place, uid)| place == to && *uid == new.uid);
    is_its && new.is_of_volume && new.is_bound && !new.is_being_deleted
}

/// The volume belongs to the claim that was deleted, to none, or to an earlier new claim.
fn can_reserve(volume: &Volume, record: &Record) -> bool {
    match &volume.claim {
        None => true,
        Some((place, uid)) => {
            (*place == record.from && (*uid == record.uid || uid.is_empty())) || *place == record.to
        }
    }
}

/// Before the first step, or after the last one.
fn next_without_record(
    from: &NamespacedName,
    to: &NamespacedName,
    volume: &Volume,
    view: &View,
) -> Next {
    let refuse = |why: String| Next::Refused(why);
    if is_new_claims(volume, to, view) {
        return Next::Done;
    }
    let Some(old) = &view.old else {
        return refuse(format!("claim {from} was deleted by another user"));
    };
    if !old.is_bound || !old.is_of_volume || !is_bound_to(volume, &old.uid) {
        return refuse(format!("claim {from} is not bound to its PersistentVolume"));
    }
    if old.is_being_deleted {
        return refuse(format!("claim {from} is being deleted by another user"));
    }
    if view.new.is_some() {
        return refuse(format!("claim {to} exists: give another name with --name"));
    }
    match &view.blocker {
        Some(why) => refuse(why.clone()),
        None => Next::Step(Step::Record),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use slackwater_core::fuzz::fuzz_text;
    use slackwater_core::record::formats::{check_with, files};

    use super::*;

    fn place(namespace: &str) -> NamespacedName {
        NamespacedName {
            namespace: namespace.into(),
            name: "data".into(),
        }
    }

    fn record(from: &str, to: &str) -> Record {
        Record {
            from: place(from),
            uid: "old".into(),
            to: place(to),
            policy: "Delete".into(),
            claim: json!({}),
            undo: None,
        }
    }

    /// A later plugin completes what an earlier one has recorded in the annotation.
    #[test]
    fn records_of_transfers_keep_their_format() {
        let begun = Record {
            claim: json!({"metadata": {"name": "data"}, "spec": {"volumeName": "pv"}}),
            ..record("shop", "other")
        };
        let undone = Record {
            undo: Some("7".into()),
            ..begun.clone()
        };
        let read = |bytes: &[u8]| serde_json::from_slice::<Record>(bytes).unwrap();
        let write = |record: &Record| json!(record).to_string().into_bytes();
        let expected = vec![("begun.json", begun), ("undone.json", undone)];
        check_with("transfer", expected, read, write);
    }

    #[test]
    fn fuzz_records_of_transfers() {
        let seeds: Vec<_> = files("transfer").into_values().collect();
        let seeds: Vec<_> = seeds.iter().map(|it| str::from_utf8(it).unwrap()).collect();
        fuzz_text("record of a transfer", &seeds, |text| {
            serde_json::from_str::<Record>(text).ok()
        });
    }

    /// All claims that can be at a place, and none.
    fn claims() -> Vec<Option<Claim>> {
        let mut all = vec![None];
        for uid in ["old", "new", "other"] {
            for bits in 0..8 {
                all.push(Some(Claim {
                    uid: uid.into(),
                    is_of_volume: bits & 1 != 0,
                    is_bound: bits & 2 != 0,
                    is_being_deleted: bits & 4 != 0,
                    ..Claim::default()
                }));
            }
        }
        all
    }

    fn volumes() -> Vec<Option<Volume>> {
        let mut all = vec![None];
        let owners = [
            None,
            Some(("shop", "old")),
            Some(("shop", "other")),
            Some(("shop", "")),
            Some(("other", "")),
            Some(("other", "new")),
            Some(("other", "other")),
            Some(("elsewhere", "x")),
        ];
        for policy in ["Delete", "Retain"] {
            for record in [
                None,
                Some(record("shop", "other")),
                Some(record("shop", "x")),
            ] {
                for owner in owners {
                    for is_being_deleted in [false, true] {
                        all.push(Some(Volume {
                            policy: policy.into(),
                            record: record.clone(),
                            claim: owner.map(|(at, uid)| (place(at), uid.to_string())),
                            is_being_deleted,
                        }));
                    }
                }
            }
        }
        all
    }

    #[test]
    fn a_transfer_that_is_being_undone_does_not_go_on() {
        let (from, to) = (place("shop"), place("other"));
        let undone = Record {
            undo: Some("7".into()),
            ..record("shop", "other")
        };
        for mut volume in volumes().into_iter().flatten() {
            volume.record = Some(undone.clone());
            for new in claims() {
                let view = View {
                    volume: Some(volume.clone()),
                    old: None,
                    new,
                    blocker: None,
                };
                let next = next(&from, &to, &view);
                let is_bound = is_new_claims(&volume, &to, &view) && !volume.is_being_deleted;
                let ends = next == Next::Step(Step::Restore);
                assert_eq!(ends, is_bound, "{view:?}");
                assert!(
                    ends || matches!(next, Next::Refused(_)),
                    "{next:?} {view:?}"
                );
            }
        }
    }

    #[test]
    fn no_state_allows_a_step_that_loses_data() {
        let (from, to) = (place("shop"), place("other"));
        let mut steps = 0;
        for volume in volumes() {
            for old in claims() {
                for new in claims() {
                    for blocker in [None, Some("a pod uses it".to_string())] {
                        let view = View {
                            volume: volume.clone(),
                            old: old.clone(),
                            new: new.clone(),
                            blocker,
                        };
                        let Next::Step(step) = next(&from, &to, &view) else {
                            continue;
                        };
                        assert_safe(step, &view);
                        steps += 1;
                    }
                }
            }
        }
        assert!(steps > 1000, "{steps}");
    }

    #[track_caller]
    fn assert_safe(step: Step, view: &View) {
        let volume = view.volume.as_ref().unwrap();
        let (old, new) = (view.old.as_ref(), view.new.as_ref());
        let is_recorded = volume.record == Some(record("shop", "other"));
        let has_old = old.is_some_and(|old| old.uid == "old");
        let is_its = old.is_some_and(|old| old.is_of_volume && is_bound_to(volume, &old.uid));
        let is_free = new.is_none_or(|new| new.is_of_volume && !new.is_being_deleted);
        let is_retained = is_recorded && volume.policy == "Retain";
        assert!(!volume.is_being_deleted, "{step:?} {view:?}");
        let owner = volume.claim.clone().unwrap_or((place(""), String::new()));
        let right = match step {
            Step::Record => {
                let is_bound = old.is_some_and(|old| old.is_bound && !old.is_being_deleted);
                let is_ready = is_bound && is_its && new.is_none();
                volume.record.is_none() && is_ready && view.blocker.is_none()
            }
            Step::Retain => is_recorded && volume.policy == "Delete",
            Step::Delete => is_retained && has_old && is_its && is_free && view.blocker.is_none(),
            // Never while the old claim exists, and never from the claim of another user.
            Step::Reserve => {
                is_retained
                    && !has_old
                    && owner.0 != place("elsewhere")
                    && owner != (place("shop"), "other".into())
            }
            Step::Create => {
                is_retained && !has_old && new.is_none() && owner == (place("other"), String::new())
            }
            Step::Restore => {
                let is_bound = new.is_some_and(|new| {
                    new.is_bound && new.is_of_volume && !new.is_being_deleted && new.uid == owner.1
                });
                is_recorded && is_bound
            }
            _ => false,
        };
        assert!(right, "{step:?} {view:?}");
    }
}
