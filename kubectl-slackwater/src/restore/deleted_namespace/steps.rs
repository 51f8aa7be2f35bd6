//! The steps of a restore whose source namespace is gone, each decided from what exists.

use kube::api::DynamicObject;
use serde_json::Value;

use super::contents;
use super::objects::Existing;
use super::state::DeletedNamespaceRestore;
use crate::change::{CHANGED, Progress, create, delete};
use crate::cli::Change;
use crate::cluster::object::{self, Fields, Kind};
use crate::failure::{Failure, Result};
use crate::restore::plan::SELECTED_NODE;
use crate::restore::{verify, wait};
use crate::text::escaped;

impl DeletedNamespaceRestore<'_> {
    /// Takes steps until a controller has to do something, or until the end.
    pub async fn advance(&self) -> Result<Progress> {
        match self.take_steps().await {
            Err(failure) if failure.is_conflict => Ok(Progress::Running(CHANGED.into())),
            done => done,
        }
    }

    async fn take_steps(&self) -> Result<Progress> {
        loop {
            let seen = self.read_objects().await?;
            self.refuse_different_times(&seen)?;
            if seen.iter().all(Existing::is_bound) {
                if self.is_check_due(&seen)
                    && let Some(progress) = self.check(&seen).await?
                {
                    return Ok(progress);
                }
                if self.delete_temporary_objects(&seen).await? {
                    continue;
                }
                let left = seen
                    .iter()
                    .find_map(|it| it.snapshot.as_ref().or(it.content.as_ref()));
                return Ok(match left {
                    Some(left) => Progress::Running(format!("{} is being deleted", left.name())),
                    None => Progress::Ended(Ok(self.ended())),
                });
            }
            if self.create_temporary_objects(&seen).await? {
                continue;
            }
            if let Some(progress) = self.wait_for_snapshots(&seen).await? {
                return Ok(progress);
            }
            if !self.create_claims(&seen).await? {
                return self.select_nodes(&seen).await;
            }
        }
    }

    /// Creates temporary objects that are missing. `false` if none is.
    async fn create_temporary_objects(&self, seen: &[Existing]) -> Result<bool> {
        let mut is_any = false;
        for (member, seen) in self.members.iter().zip(seen) {
            if seen.is_bound() {
                continue;
            }
            let content = seen.content.as_ref();
            if let Some(stale) = content.filter(|_| seen.is_stale()) {
                if !stale.is_being_deleted() {
                    self.delete(&object::SNAPSHOT_CONTENT, stale).await?;
                    is_any = true;
                }
                continue;
            }
            if content.is_none() {
                let manifest = member.content_manifest(&self.cluster.driver);
                self.create(&object::SNAPSHOT_CONTENT, manifest).await?;
                is_any = true;
            }
            if seen.snapshot.is_none() {
                let manifest = member.snapshot_manifest();
                self.create(&object::SNAPSHOT, manifest).await?;
                is_any = true;
            }
        }
        Ok(is_any)
    }

    /// Waits until claims can be created from all snapshots. `None` if they can.
    async fn wait_for_snapshots(&self, seen: &[Existing]) -> Result<Option<Progress>> {
        for (member, seen) in self.members.iter().zip(seen) {
            if seen.is_ready() || seen.claim.is_some() {
                continue;
            }
            let title = format!(
                "VolumeSnapshot {}/{}",
                self.namespace(),
                member.copy.snapshot.name
            );
            if let Some(content) = &seen.content
                && contents::has_no_group(&self.cluster, content).await?
            {
                return Ok(Some(Progress::Ended(Err(Failure::failed(format!(
                    "{title} never becomes ready: its snapshot reports the group {}, and no VolumeGroupSnapshotContent has this handle: create one with the policy Retain (docs/restore.md), and run the command again",
                    content.text("/status/volumeGroupSnapshotHandle")
                ))))));
            }
            let of = |it: &Option<DynamicObject>| -> String {
                let error = it.as_ref().map(|it| it.text("/status/error/message"));
                error.unwrap_or_default().into()
            };
            let why = match (of(&seen.snapshot), of(&seen.content)) {
                (why, other) if why.is_empty() => other,
                (why, _) => why,
            };
            return Ok(Some(Progress::Running(match why.as_str() {
                "" => format!("{title} is not ready yet"),
                why => format!("{title} is not ready yet: {why}"),
            })));
        }
        Ok(None)
    }

    /// Creates the claims that are missing. `false` if none is.
    async fn create_claims(&self, seen: &[Existing]) -> Result<bool> {
        let mut is_any = false;
        for (member, seen_one) in self.members.iter().zip(seen) {
            if seen_one.claim.is_some() {
                continue;
            }
            self.refuse_pods(seen).await?;
            let claim = self.claim(&member.copy)?;
            self.create(&object::CLAIM, claim).await?;
            self.chosen.borrow_mut().insert(member.copy.claim.clone());
            is_any = true;
        }
        Ok(is_any)
    }

    /// Has volumes created that do not exist yet.
    async fn select_nodes(&self, seen: &[Existing]) -> Result<Progress> {
        let mut coming = None;
        for (member, seen) in self.members.iter().zip(seen) {
            let copy = &member.copy;
            let Some(claim) = seen.claim.as_ref().filter(|_| !seen.is_bound()) else {
                continue;
            };
            coming.get_or_insert(copy.claim.as_str());
            let Some(node) = self.node(copy)? else {
                continue;
            };
            if !claim.annotation(SELECTED_NODE).is_empty() {
                continue;
            }
            wait::select_node(&self.cluster, &self.chosen, claim, node).await?;
        }
        let claim = coming.unwrap_or_default();
        let message = wait::last_event(&self.cluster, claim).await?;
        let exist = seen.iter().filter(|it| it.is_bound()).count();
        Ok(Progress::Running(format!(
            "{exist} of {} volumes exist; claim {claim}: {message}",
            seen.len()
        )))
    }

    /// Has the claims checked. `None` if the check has succeeded.
    async fn check(&self, seen: &[Existing]) -> Result<Option<Progress>> {
        let copies = self.copies_for_check(seen);
        verify::until_success(&self.cluster, self.arguments, &copies, &self.is_checked).await
    }

    /// Deletes temporary objects, the VolumeSnapshots first: a content that is bound is deleted after its
    /// VolumeSnapshot. `false` if there is nothing to delete now.
    async fn delete_temporary_objects(&self, seen: &[Existing]) -> Result<bool> {
        let mut is_any = false;
        for seen in seen {
            let (kind, object) = match (&seen.snapshot, &seen.content) {
                (Some(snapshot), _) => (&object::SNAPSHOT, snapshot),
                (None, Some(content)) => (&object::SNAPSHOT_CONTENT, content),
                (None, None) => continue,
            };
            if !object.is_being_deleted() {
                self.delete(kind, object).await?;
                is_any = true;
            }
        }
        Ok(is_any)
    }

    async fn create(&self, kind: &Kind, manifest: Value) -> Result<()> {
        let name = manifest["metadata"]["name"].as_str().unwrap_or_default();
        let line = format!("{} {} is created", kind.kind, escaped(name));
        create(
            &self.cluster,
            &Change::CONFIRMED,
            kind,
            self.namespace(),
            manifest,
        )
        .await?;
        eprintln!("{line}");
        Ok(())
    }

    /// Deletes exactly the object that was read: a content is Retain in this version.
    async fn delete(&self, kind: &Kind, object: &DynamicObject) -> Result<()> {
        let name = object.name();
        let version = match kind.is_namespaced {
            true => None,
            false => object.metadata.resource_version.as_deref(),
        };
        let of = (object.uid(), version);
        delete(
            &self.cluster,
            &Change::CONFIRMED,
            kind,
            self.namespace(),
            name,
            of,
        )
        .await?;
        eprintln!("{} {} is deleted", kind.kind, escaped(name));
        Ok(())
    }
}
