//! A restore into another namespace. A claim can be restored only from a snapshot of its own namespace,
//! so each copy is created there under a name of its own, and transferred when the volumes of all copies
//! exist ([`crate::transfer`]).
//!
//! The next step is decided from what exists. The temporary claim has the UID of its snapshot in its
//! name, and the name of the final claim in an annotation. The PersistentVolume records the transfer.
//! The final claim has the name of the temporary one in an annotation. So a command that was interrupted
//! anywhere is repeated.

mod stage;
mod state;
mod steps;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use kube::api::DynamicObject;

use super::nodes;
use super::plan::{Copy, State};
use super::report::{self, is_for_people};
use super::storage_class::is_immediate;
use super::{verify, wait};
use crate::change::{Need, create, mark, print_lines, require};
use crate::cli::{Change, Format, RestoreArguments};
use crate::cluster::Cluster;
use crate::cluster::object::{self, Kind};
use crate::failure::{Failure, Result};
use crate::transfer::execute::{find_namespace_blocker, manifest};
use stage::{Stage, has_ended, target_claim, temporary_claim};

pub use state::CrossNamespaceRestore;

/// Restores into another namespace.
pub async fn run(cluster: &Cluster, arguments: &RestoreArguments, namespace: &str) -> Result<()> {
    let restore = CrossNamespaceRestore::read(cluster, arguments, namespace).await?;
    let stages = stage::read_stages(cluster, &restore.copies).await?;
    let format = arguments.output.format;
    if has_ended(&stages) {
        if is_for_people(format) {
            print_lines(&restore.ended());
        }
        return restore.print(&stages, format);
    }
    let kept = restore.refuse(&stages).await?;
    restore.refuse_check(&stages).await?;
    let is_check_due = restore.is_check_due(&stages);
    require(cluster, &restore.needs(is_check_due)).await?;
    restore.confirm(&stages, &kept)?;
    restore
        .check_with_dry_run(&stages, &arguments.change, format)
        .await?;
    if is_check_due {
        verify::check_with_dry_run(cluster, arguments, &restore.copies).await?;
    }
    if arguments.change.dry_run {
        return restore.print(&stages, format);
    }
    let last = wait::until_end_of_steps(&arguments.wait, || restore.advance()).await?;
    match is_for_people(format) {
        true => {
            print_lines(&last);
            if let Some((slots, set)) = &restore.user {
                print_lines(&set.advice(slots, None));
            }
        }
        false => restore.print(&stage::read_stages(cluster, &restore.copies).await?, format)?,
    }
    Ok(())
}

impl CrossNamespaceRestore<'_> {
    /// Refuses what would fail later. Returns the claims of the StatefulSet that no member restores, and
    /// that are kept.
    async fn refuse(&self, stages: &[Stage]) -> Result<Vec<String>> {
        self.refuse_different_times(stages)?;
        if let Some(why) = find_namespace_blocker(self.cluster, self.namespace).await? {
            return Err(Failure::failed(why));
        }
        for (copy, stage) in self.copies.iter().zip(stages) {
            if matches!(stage, Stage::Absent | Stage::Unbound(_)) {
                self.node(copy)?;
            }
        }
        self.refuse_pods(stages).await?;
        let Some((slots, set)) = &self.user else {
            return Ok(Vec::new());
        };
        set.refuse_managed(self.cluster).await?;
        set.refuse_gaps(self.cluster, slots).await
    }

    /// Refuses a check that is not possible, or that could change a copy.
    async fn refuse_check(&self, stages: &[Stage]) -> Result<()> {
        let check = &self.arguments.check;
        if !self.is_check_due(stages) {
            if check.verify.is_some() {
                let note = "the transfer has begun, so the copies are not checked any more";
                self.cluster.note(note.into());
            }
            return Ok(());
        }
        verify::refuse(check, &self.copies)?;
        let advice =
            "Restore single members by the names of their VolumeSnapshots, or leave out --verify";
        nodes::refuse_several_nodes(self.cluster, &self.target_copies(stages), |_| true, advice)
            .await
    }

    /// All permissions of all steps.
    fn needs(&self, is_check_due: bool) -> Vec<Need<'_>> {
        let (from, to) = (self.cluster.namespace.as_str(), self.namespace);
        let mut verbs: Vec<(&str, &Kind, &str)> = vec![
            ("get", &object::CLAIM, from),
            ("list", &object::CLAIM, from),
            ("create", &object::CLAIM, from),
            ("delete", &object::CLAIM, from),
            ("list", &object::POD, from),
            ("get", &object::CLAIM, to),
            ("create", &object::CLAIM, to),
            ("list", &object::POD, to),
            ("get", &object::VOLUME, ""),
            ("list", &object::VOLUME, ""),
            ("patch", &object::VOLUME, ""),
        ];
        let chooses = |copy: &Copy| !is_immediate(&self.classes, copy);
        if self.copies.iter().any(chooses) {
            verbs.push(("patch", &object::CLAIM, from));
        }
        if self.user.is_some() {
            verbs.push(("get", &object::STATEFUL_SET, to));
        }
        if is_check_due {
            verbs.extend(["create", "get", "delete"].map(|verb| (verb, &object::POD, from)));
        }
        let need = |(verb, kind, namespace)| Need {
            verb,
            kind,
            namespace,
            name: "",
        };
        verbs.into_iter().map(need).collect()
    }

    /// The copies as they will be, with how far they are.
    fn target_copies(&self, stages: &[Stage]) -> Vec<Copy> {
        let each = self.copies.iter().zip(stages);
        let each = each.map(|(copy, stage)| {
            let (state, volume) = match stage {
                Stage::Absent => (State::Planned, ""),
                Stage::Unbound(_) => (State::Exists, ""),
                Stage::Bound(bound) => (State::Exists, bound.volume.as_str()),
                Stage::Transferring(volume) => (State::Exists, volume.as_str()),
                Stage::Transferred(volume) => (State::Bound, volume.as_str()),
            };
            let mut target_copies = copy.clone();
            (target_copies.claim, target_copies.volume) = (target_claim(copy).name, volume.into());
            target_copies.state = state;
            target_copies
        });
        each.collect()
    }

    fn print(&self, stages: &[Stage], format: Format) -> Result<()> {
        match is_for_people(format) {
            true => Ok(()),
            false => report::print(
                self.cluster,
                self.namespace,
                &self.target_copies(stages),
                format,
            ),
        }
    }

    fn confirm(&self, stages: &[Stage], kept: &[String]) -> Result<()> {
        let copies = self.target_copies(stages);
        report::confirm(
            self.cluster,
            self.arguments,
            (self.namespace, &copies),
            || self.plan(&copies, stages, kept),
        )
    }

    fn plan(&self, copies: &[Copy], stages: &[Stage], kept: &[String]) -> String {
        let mut plan = format!(
            "{} will be restored into claims of namespace {}:\n{}",
            self.title,
            self.namespace,
            report::plan(copies, self.arguments.output.format)
        );
        let former: Vec<_> = self.copies.iter().map(|copy| copy.claim.as_str()).collect();
        let _ = write!(
            plan,
            "\nThey are created as {} in namespace {} first, and are transferred when all volumes exist",
            former.join(", "),
            self.cluster.namespace
        );
        let _ = match self.is_check_due(stages) {
            false => write!(plan, "."),
            true => {
                let what = verify::plan(&self.arguments.check);
                write!(plan, " and their check has succeeded. {what}")
            }
        };
        let chosen = self.copies.iter().filter_map(|copy| self.node(copy).ok()?);
        let chosen: BTreeSet<_> = chosen.collect();
        if !chosen.is_empty() {
            let chosen: Vec<_> = chosen.into_iter().collect();
            let _ = write!(
                plan,
                "\nTheir volumes are created where the snapshots are: on {}.",
                chosen.join(", ")
            );
        }
        plan.push_str(&report::kept(kept));
        if !stages.iter().all(|stage| matches!(stage, Stage::Absent)) {
            plan.push_str("\nAn earlier run has begun this.");
        }
        plan
    }

    /// Lets the API server check the new claims, and with --dry-run also the others: a quota or a policy of
    /// the other namespace may refuse them.
    async fn check_with_dry_run(
        &self,
        stages: &[Stage],
        change: &Change,
        format: Format,
    ) -> Result<()> {
        let mark = mark(&Change::DRY_RUN);
        for (copy, stage) in self.copies.iter().zip(stages) {
            if !matches!(stage, Stage::Absent) {
                continue;
            }
            let (from, to, former) = (
                temporary_claim(self.cluster, copy),
                target_claim(copy),
                self.temporary_manifest(copy)?,
            );
            let like: DynamicObject = serde_json::from_value(former.clone())
                .map_err(|error| Failure::failed(format!("claim {from}: {error}")))?;
            if change.dry_run {
                create(
                    self.cluster,
                    &Change::DRY_RUN,
                    &object::CLAIM,
                    &from.namespace,
                    former,
                )
                .await?;
            }
            let new = manifest(&from, &to, &copy.claim, &like);
            create(
                self.cluster,
                &Change::DRY_RUN,
                &object::CLAIM,
                &to.namespace,
                new,
            )
            .await?;
            if change.dry_run && is_for_people(format) {
                print_lines(&format!(
                    "persistentvolumeclaim/{} created{mark}",
                    from.name
                ));
                print_lines(&format!("claim {from} transferred to {to}{mark}"));
            }
        }
        Ok(())
    }
}
