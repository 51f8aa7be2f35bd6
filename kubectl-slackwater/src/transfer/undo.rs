//! `transfer --undo`: the volume goes back to its former claim, unless the new claim is already bound. As
//! for the transfer, the next step is decided from what exists.
//!
//! The record is marked first, so no run of the transfer continues. A run that has already decided to
//! delete the former claim names the version that it has read; so the undo writes to that claim before
//! it restores the reclaim policy.

use serde_json::json;

use super::execute::{Observed, TRANSFERRED_FROM, Transfer, UNDONE, record_of, reserved};
use super::step::{NamespacedName, Next, Step, View, get_volume, is_new_claims};
use crate::change::{create, delete, patch};
use crate::cli::Change;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result};

/// The command that brings a claim back.
pub fn transfer_back_command(from: &NamespacedName, to: &NamespacedName) -> String {
    format!(
        "kubectl slackwater transfer {} -n {} --to-namespace {} --name {}",
        to.name, to.namespace, from.namespace, from.name
    )
}

/// Decides the next step.
pub fn next(from: &NamespacedName, to: &NamespacedName, view: &View) -> Next {
    let volume = match get_volume(view) {
        Ok(volume) => volume,
        Err(refused) => return refused,
    };
    let Some(record) = &volume.record else {
        return Next::Done;
    };
    if record.from != *from || record.to != *to {
        return Next::Refused("its PersistentVolume records another transfer".into());
    }
    if is_new_claims(volume, to, view) {
        return Next::Refused(format!(
            "claim {to} is bound to the volume already, and pods may use it. Complete the transfer with `kubectl slackwater transfer {} -n {} --to-namespace {} --name {}`, and transfer the claim back with `{}`",
            from.name,
            from.namespace,
            to.namespace,
            to.name,
            transfer_back_command(from, to)
        ));
    }
    let Some(attempt) = &record.undo else {
        return Next::Step(Step::Mark);
    };
    if volume.policy != "Retain" {
        return Next::Step(Step::Retain);
    }
    // Another user's claim of this name can be bound only while the volume is reserved for it.
    let new = view.new.as_ref();
    if let Some(new) = new.filter(|new| new.is_of_volume && new.is_transferred) {
        return match new.is_being_deleted {
            true => Next::Wait("the new claim is being deleted"),
            false => Next::Step(Step::Withdraw),
        };
    }
    let is_reserved = volume.claim == Some((from.clone(), String::new()));
    let Some(old) = &view.old else {
        return match (is_reserved, can_give_back(volume.claim.as_ref(), from, to)) {
            (true, _) => Next::Step(Step::Recreate),
            (false, true) => Next::Step(Step::GiveBack),
            (false, false) => Next::Refused("its PersistentVolume belongs to another claim".into()),
        };
    };
    if old.is_being_deleted {
        return Next::Wait("the old claim is being deleted");
    }
    if !old.is_of_volume {
        return Next::Refused(format!(
            "claim {from} exists, and is not bound to the PersistentVolume, which stays Retain with the record of the transfer"
        ));
    }
    if volume.claim == Some((from.clone(), old.uid.clone())) {
        // One that was created again is not what a run of the transfer deletes.
        let is_kept = old.uid != record.uid || old.undone == *attempt;
        return match (old.is_bound, is_kept) {
            (false, _) => Next::Wait("the old claim is being bound"),
            (true, false) => Next::Step(Step::Keep),
            (true, true) => Next::Step(Step::Restore),
        };
    }
    match (is_reserved, can_give_back(volume.claim.as_ref(), from, to)) {
        (true, _) => Next::Wait("the old claim is being bound"),
        (false, true) => Next::Step(Step::GiveBack),
        (false, false) => Next::Refused("its PersistentVolume belongs to another claim".into()),
    }
}

/// The volume belongs to none, to the old claim, or to the new one, and that claim is gone.
fn can_give_back(
    claim: Option<&(NamespacedName, String)>,
    from: &NamespacedName,
    to: &NamespacedName,
) -> bool {
    claim.is_none_or(|(place, _)| place == from || place == to)
}

/// Takes a step that was decided from what was read. `false`: an object has changed since then, and
/// nothing was stored.
pub async fn perform(
    transfer: &Transfer<'_>,
    step: Step,
    seen: &Observed,
    change: &Change,
) -> Result<bool> {
    match execute(transfer, step, seen, change).await {
        Err(failure) if failure.is_conflict => Ok(false),
        done => done,
    }
}

async fn execute(
    transfer: &Transfer<'_>,
    step: Step,
    seen: &Observed,
    change: &Change,
) -> Result<bool> {
    let (cluster, from, to) = (transfer.cluster, &transfer.from, &transfer.to);
    let Some(volume) = &seen.volume else {
        return Ok(false);
    };
    let Some(mut record) = record_of(volume)? else {
        return Ok(false);
    };
    match (step, &seen.old, &seen.new) {
        (Step::Mark, ..) => {
            record.undo.clone_from(&volume.metadata.resource_version);
            let text = serde_json::to_string(&record)
                .map_err(|error| Failure::failed(format!("writing the record: {error}")))?;
            let fields = json!({"metadata": {"annotations": {super::execute::RECORD: text}}});
            patch(cluster, change, &object::VOLUME, volume, fields).await?;
        }
        (Step::GiveBack, ..) => {
            patch(cluster, change, &object::VOLUME, volume, reserved(from)).await?;
        }
        (Step::Keep, Some(old), _) => {
            let fields = json!({"metadata": {"annotations": {UNDONE: record.undo}}});
            patch(cluster, change, &object::CLAIM, old, fields).await?;
        }
        (Step::Withdraw, _, Some(new)) => {
            let which = (new.uid(), new.metadata.resource_version.as_deref());
            delete(
                cluster,
                change,
                &object::CLAIM,
                &to.namespace,
                &to.name,
                which,
            )
            .await?;
        }
        (Step::Recreate, ..) => {
            let mut claim = record.claim;
            claim["metadata"]["name"] = json!(from.name);
            if let Some(annotations) = claim["metadata"]["annotations"].as_object_mut() {
                annotations.remove(TRANSFERRED_FROM);
            }
            create(cluster, change, &object::CLAIM, &from.namespace, claim).await?;
        }
        (Step::Retain | Step::Restore, ..) => return transfer.perform(step, seen, change).await,
        _ => return Ok(false),
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::step::{Claim, Record, Volume};

    fn place(namespace: &str) -> NamespacedName {
        NamespacedName {
            namespace: namespace.into(),
            name: "data".into(),
        }
    }

    fn claims() -> Vec<Option<Claim>> {
        let mut all = vec![None];
        for uid in ["old", "new", "other"] {
            for undone in ["", "6", "7"] {
                for bits in 0..16 {
                    all.push(Some(Claim {
                        uid: uid.into(),
                        is_of_volume: bits & 1 != 0,
                        is_bound: bits & 2 != 0,
                        is_being_deleted: bits & 4 != 0,
                        is_transferred: bits & 8 != 0,
                        undone: undone.into(),
                    }));
                }
            }
        }
        all
    }

    fn volumes() -> Vec<Option<Volume>> {
        let owners = [
            None,
            Some(("shop", "old")),
            Some(("shop", "other")),
            Some(("shop", "")),
            Some(("other", "")),
            Some(("other", "new")),
            Some(("elsewhere", "x")),
        ];
        let mut all = vec![None];
        for policy in ["Delete", "Retain"] {
            for undo in [None, Some("7".to_string())] {
                for owner in owners {
                    for is_being_deleted in [false, true] {
                        all.push(Some(Volume {
                            policy: policy.into(),
                            record: Some(Record {
                                from: place("shop"),
                                uid: "old".into(),
                                to: place("other"),
                                policy: "Delete".into(),
                                claim: json!({}),
                                undo: undo.clone(),
                            }),
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
    fn no_state_allows_a_step_back_that_loses_data() {
        let mut steps = 0;
        for volume in volumes() {
            for old in claims() {
                for new in claims() {
                    let view = View {
                        volume: volume.clone(),
                        old: old.clone(),
                        new,
                        blocker: None,
                    };
                    let next = next(&place("shop"), &place("other"), &view);
                    let Next::Step(step) = next else { continue };
                    assert_safe(step, &view);
                    steps += 1;
                }
            }
        }
        assert!(steps > 1000, "{steps}");
    }

    #[track_caller]
    fn assert_safe(step: Step, view: &View) {
        let volume = view.volume.as_ref().unwrap();
        let (old, new) = (view.old.as_ref(), view.new.as_ref());
        let record = volume.record.as_ref().unwrap();
        let is_retained = record.undo.is_some() && volume.policy == "Retain";
        let (owner, uid) = volume.claim.clone().unwrap_or((place(""), String::new()));
        let is_alive = |claim: Option<&Claim>, at: &str| {
            owner == place(at) && claim.is_some_and(|claim| claim.uid == uid && claim.is_bound)
        };
        let right = match step {
            Step::Mark => record.undo.is_none(),
            Step::Retain => record.undo.is_some() && volume.policy == "Delete",
            Step::Keep => {
                is_retained && old.is_some_and(|old| old.uid == "old" && !old.is_being_deleted)
            }
            // Never one with which pods can have begun, and never another user's.
            Step::Withdraw => {
                let is_own = new.is_some_and(|new| new.is_transferred && new.is_of_volume);
                is_retained && is_own
            }
            Step::GiveBack => {
                let has_old = old.is_some_and(|old| owner == place("shop") && old.uid == uid);
                is_retained && owner != place("elsewhere") && !has_old
            }
            Step::Recreate => {
                is_retained && old.is_none() && owner == place("shop") && uid.is_empty()
            }
            // Only if the old claim has the volume, and no run of the transfer can delete it.
            Step::Restore => {
                let is_kept = old.is_some_and(|old| old.uid != "old" || old.undone == "7");
                let is_there = old.is_some_and(|old| old.is_of_volume && !old.is_being_deleted);
                is_retained && is_kept && is_there && is_alive(old, "shop")
            }
            _ => false,
        };
        let is_arrived = is_new_claims(volume, &place("other"), view);
        assert!(
            right && !is_arrived && !volume.is_being_deleted,
            "{step:?} {view:?}"
        );
    }
}
