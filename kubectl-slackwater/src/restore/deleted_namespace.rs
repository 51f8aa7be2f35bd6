//! A restore of a snapshot, or of a group of snapshots, whose namespace is gone. The user names a content. For
//! each snapshot, a content and a VolumeSnapshot are created in the namespace of the new claim, and are
//! deleted when the claims are bound ([`objects`]).
//!
//! What is to be done is decided from what exists, so a command that was interrupted anywhere is repeated.

mod claims;
mod contents;
mod objects;
mod state;
mod steps;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::plan::{Copy, State};
use super::report::{self, is_for_people};
use super::storage_class::is_immediate;
use super::{nodes, verify, wait};
use crate::change::{Need, create, mark, print_lines, require};
use crate::cli::{Change, Format, RestoreArguments};
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields, Kind};
use crate::failure::{Failure, Result};

pub use contents::ContentName;
use objects::{Existing, Member};
pub use state::DeletedNamespaceRestore;

/// Restores into the namespace of `--to-namespace`.
pub async fn run(
    cluster: &Cluster,
    arguments: &RestoreArguments,
    which: &ContentName,
) -> Result<()> {
    if arguments.statefulset.is_some() {
        return Err(Failure::usage(
            "--statefulset is not for a content: its claims get the names that they had, or those of --claim".into(),
        ));
    }
    let restore = DeletedNamespaceRestore::read(cluster, arguments, which).await?;
    let (seen, format) = (restore.read_objects().await?, arguments.output.format);
    if restore.has_ended(&seen) {
        if is_for_people(format) {
            print_lines(&restore.ended());
        }
        return restore.print(&seen, format);
    }
    restore.refuse_seen(&seen).await?;
    restore.refuse_check(&seen).await?;
    let is_check_due = restore.is_check_due(&seen);
    require(&restore.cluster, &restore.needs(is_check_due)).await?;
    restore.confirm(&seen)?;
    restore
        .check_with_dry_run(&seen, &arguments.change, format)
        .await?;
    if is_check_due {
        verify::check_with_dry_run(
            &restore.cluster,
            arguments,
            &restore.copies_for_check(&seen),
        )
        .await?;
    }
    if arguments.change.dry_run {
        return restore.print(&seen, format);
    }
    let last = wait::until_end_of_steps(&arguments.wait, || restore.advance()).await?;
    match is_for_people(format) {
        true => print_lines(&last),
        false => restore.print(&restore.read_objects().await?, format)?,
    }
    Ok(())
}

impl DeletedNamespaceRestore<'_> {
    /// Refuses a check that is not possible, or that could change a claim.
    async fn refuse_check(&self, seen: &[Existing]) -> Result<()> {
        let check = &self.arguments.check;
        if !self.is_check_due(seen) {
            if check.verify.is_some() {
                let note = "the claims are restored, so they are not checked any more";
                self.cluster.note(note.into());
            }
            return Ok(());
        }
        let copies = self.copies(seen);
        verify::refuse(check, &copies)?;
        let advice = "Restore single members as volumesnapshotcontent/NAME, or leave out --verify";
        nodes::refuse_several_nodes(&self.cluster, &copies, |_| true, advice).await
    }

    /// All permissions of all steps.
    fn needs(&self, is_check_due: bool) -> Vec<Need<'_>> {
        let mut verbs: Vec<(&str, &Kind)> = Vec::new();
        for kind in [&object::SNAPSHOT_CONTENT, &object::SNAPSHOT, &object::CLAIM] {
            verbs.extend([("get", kind), ("create", kind)]);
        }
        verbs.push(("delete", &object::SNAPSHOT_CONTENT));
        verbs.push(("delete", &object::SNAPSHOT));
        verbs.push(("list", &object::SNAPSHOT_CONTENT));
        verbs.push(("list", &object::GROUP_CONTENT));
        verbs.push(("list", &object::POD));
        let chooses = |member: &Member| !is_immediate(&self.classes, &member.copy);
        if self.members.iter().any(chooses) {
            verbs.push(("patch", &object::CLAIM));
        }
        if is_check_due {
            verbs.extend(["create", "get", "delete"].map(|verb| (verb, &object::POD)));
        }
        let need = |(verb, kind)| Need {
            verb,
            kind,
            namespace: self.namespace(),
            name: "",
        };
        verbs.into_iter().map(need).collect()
    }

    /// The copies, with how far they are.
    fn copies(&self, seen: &[Existing]) -> Vec<Copy> {
        let each = self.members.iter().zip(seen);
        let each = each.map(|(member, seen)| {
            let mut shown = member.copy.clone();
            (shown.state, shown.since) = match &seen.claim {
                None => (State::Planned, None),
                Some(claim) if seen.is_bound() => (State::Bound, claim.created()),
                Some(claim) => (State::Exists, claim.created()),
            };
            shown.uid = seen.claim.as_ref().map_or("", Fields::uid).into();
            let volume = seen.claim.as_ref();
            shown.volume = volume.map_or("", |it| it.text("/spec/volumeName")).into();
            shown
        });
        each.collect()
    }

    /// The same as a person reads them: each snapshot has the name of its content.
    fn displayed_copies(&self, seen: &[Existing]) -> Vec<Copy> {
        let mut shown = self.copies(seen);
        for copy in &mut shown {
            copy.snapshot.name.clone_from(&copy.snapshot.content);
        }
        shown
    }

    /// The same for the pod of a check, where each volume has the name of its former claim: that of the new
    /// one, if the former is not known.
    fn copies_for_check(&self, seen: &[Existing]) -> Vec<Copy> {
        let mut checked = self.copies(seen);
        for copy in &mut checked {
            if copy.snapshot.claim.is_empty() {
                copy.snapshot.claim.clone_from(&copy.claim);
            }
        }
        checked
    }

    fn print(&self, seen: &[Existing], format: Format) -> Result<()> {
        match is_for_people(format) {
            true => Ok(()),
            false => report::print(
                &self.cluster,
                self.namespace(),
                &self.displayed_copies(seen),
                format,
            ),
        }
    }

    fn confirm(&self, seen: &[Existing]) -> Result<()> {
        let copies = self.displayed_copies(seen);
        let place = (self.namespace(), &copies[..]);
        report::confirm(&self.cluster, self.arguments, place, || {
            self.plan(&copies, seen)
        })
    }

    fn plan(&self, copies: &[Copy], seen: &[Existing]) -> String {
        let mut plan = format!(
            "{}, whose namespace is gone, will be restored into claims of namespace {}:\n{}",
            self.title,
            self.namespace(),
            report::plan(copies, self.arguments.output.format)
        );
        let names: Vec<_> = self
            .members
            .iter()
            .map(|it| it.copy.snapshot.name.as_str())
            .collect();
        let _ = write!(
            plan,
            "\nThe VolumeSnapshots {} and contents for them, which are Retain, are created first, and are deleted when all claims are bound",
            names.join(", ")
        );
        if self.is_check_due(seen) {
            let what = verify::plan(&self.arguments.check);
            let _ = write!(plan, " and their check has succeeded. {what}");
        } else {
            plan.push('.');
        }
        plan.push_str(" The contents that exist now stay, with their snapshots.");
        let chosen = self.members.iter();
        let chosen = chosen.filter_map(|member| self.node(&member.copy).ok()?);
        let chosen: BTreeSet<_> = chosen.collect();
        if !chosen.is_empty() {
            let chosen: Vec<_> = chosen.into_iter().collect();
            let _ = write!(
                plan,
                "\nThe volumes are created where the snapshots are: on {}.",
                chosen.join(", ")
            );
        }
        let is_begun = |it: &Existing| it.content.is_some() || it.claim.is_some();
        if seen.iter().any(is_begun) {
            plan.push_str("\nAn earlier run has begun this.");
        }
        plan
    }

    /// Lets the API server check all objects that do not exist yet: a quota or a policy of the namespace may
    /// refuse them.
    async fn check_with_dry_run(
        &self,
        seen: &[Existing],
        change: &Change,
        format: Format,
    ) -> Result<()> {
        for (member, seen) in self.members.iter().zip(seen) {
            let content = member.content_manifest(&self.cluster.driver);
            let snapshot = member.snapshot_manifest();
            let is_absent = seen.claim.is_none();
            let objects = [
                (
                    &object::SNAPSHOT_CONTENT,
                    content,
                    is_absent && seen.content.is_none(),
                ),
                (
                    &object::SNAPSHOT,
                    snapshot,
                    is_absent && seen.snapshot.is_none(),
                ),
                (&object::CLAIM, self.claim(&member.copy)?, is_absent),
            ];
            for (kind, manifest, is_absent) in objects {
                if !is_absent {
                    continue;
                }
                let name = manifest["metadata"]["name"].to_string();
                create(
                    &self.cluster,
                    &Change::DRY_RUN,
                    kind,
                    self.namespace(),
                    manifest,
                )
                .await?;
                if change.dry_run && is_for_people(format) {
                    let kind = kind.kind.to_lowercase();
                    let name = name.trim_matches('"');
                    print_lines(&format!("{kind}/{name} created{}", mark(change)));
                }
            }
        }
        Ok(())
    }
}
