//! The state of a restore from a deleted namespace, and what is refused at each of its steps.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use kube::api::ListParams;
use serde_json::Value;

use super::claims;
use super::contents::{self, ContentName};
use super::objects::{Existing, Member};
use crate::cli::RestoreArguments;
use crate::cluster::object;
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::restore::nodes::{self, Nodes};
use crate::restore::plan::Copy;
use crate::restore::report;
use crate::restore::stateful_set;
use crate::restore::storage_class::{self, Classes};
use crate::transfer::execute::find_namespace_blocker;

/// A restore that has not ended.
pub struct DeletedNamespaceRestore<'a> {
    /// Its namespace is that of the new claims.
    pub cluster: Cluster,
    pub title: String,
    pub members: Vec<Member>,
    pub classes: Classes,
    nodes: Nodes,
    /// The claims for which this run has chosen the node. If the provisioner gives the node up, the same node
    /// is not chosen again and again.
    pub chosen: RefCell<BTreeSet<String>>,
    pub arguments: &'a RestoreArguments,
    /// Whether the check has succeeded in this run.
    pub is_checked: Cell<bool>,
}

impl<'a> DeletedNamespaceRestore<'a> {
    /// Reads what is to be restored.
    pub async fn read(
        cluster: &Cluster,
        arguments: &'a RestoreArguments,
        which: &ContentName,
    ) -> Result<DeletedNamespaceRestore<'a>> {
        let Some(to) = &arguments.to_namespace else {
            return Err(Failure::usage(
                "a content is restored into the namespace of --to-namespace".into(),
            ));
        };
        let cluster = Cluster::with_client(cluster.client.clone(), to, &cluster.driver);
        let source = contents::get_source(&cluster, which, to).await?;
        let title = source.title.clone();
        let mut members = claims::members(source, arguments, to)?;
        let mut copies: Vec<_> = members.iter().map(|it| it.copy.clone()).collect();
        storage_class::resolve(&cluster, &mut copies).await?;
        let classes = storage_class::read(&cluster, &copies).await?;
        let nodes = nodes::read_for(&cluster, &classes, &copies).await?;
        for (member, copy) in members.iter_mut().zip(copies) {
            member.copy = copy;
        }
        Ok(DeletedNamespaceRestore {
            cluster,
            title,
            members,
            classes,
            nodes,
            chosen: RefCell::default(),
            arguments,
            is_checked: Cell::new(false),
        })
    }

    pub fn namespace(&self) -> &str {
        &self.cluster.namespace
    }

    /// Reads what exists.
    pub async fn read_objects(&self) -> Result<Vec<Existing>> {
        let mut seen = Vec::new();
        for member in &self.members {
            seen.push(member.read_objects(&self.cluster).await?);
        }
        Ok(seen)
    }

    /// Whether nothing is left to do.
    pub fn has_ended(&self, seen: &[Existing]) -> bool {
        let is_clean =
            |it: &Existing| it.is_bound() && it.snapshot.is_none() && it.content.is_none();
        seen.iter().all(is_clean)
    }

    /// Whether the claims are to be checked before the first temporary object is deleted. Not once one is:
    /// their check has succeeded then, or was not requested.
    pub fn is_check_due(&self, seen: &[Existing]) -> bool {
        let begun = |it: &Existing| it.is_bound() && !it.has_temporary();
        self.arguments.check.verify.is_some() && !self.is_checked.get() && !seen.iter().any(begun)
    }

    pub fn ended(&self) -> String {
        let claims = report::count(self.members.len());
        format!(
            "{} is restored into {claims} of namespace {}. It stays, with its snapshots.",
            self.title,
            self.namespace()
        )
    }

    /// Refuses what would fail later.
    pub async fn refuse(&self) -> Result<()> {
        self.refuse_seen(&self.read_objects().await?).await
    }

    pub async fn refuse_seen(&self, seen: &[Existing]) -> Result<()> {
        self.refuse_different_times(seen)?;
        if let Some(why) = find_namespace_blocker(&self.cluster, self.namespace()).await? {
            return Err(Failure::failed(why));
        }
        for (member, seen) in self.members.iter().zip(seen) {
            if !seen.is_bound() {
                self.node(&member.copy)?;
            }
            self.refuse_group(&member.copy.snapshot.group).await?;
        }
        self.refuse_pods(seen).await
    }

    /// Refuses a group in the namespace with the name of the members' group: snapshot-controller finds groups
    /// by name in the namespace of a snapshot, and would let it own the temporary ones, which then could
    /// not be deleted without it.
    pub async fn refuse_group(&self, name: &str) -> Result<()> {
        let found = self
            .cluster
            .find_one(&object::GROUP, self.namespace(), name);
        match found.await? {
            None => Ok(()),
            Some(_) => Err(Failure::failed(format!(
                "VolumeGroupSnapshot {}/{name} has the name of the group of the snapshots, and snapshot-controller would take them for its members: delete it first, or restore into another namespace and transfer the claims",
                self.namespace()
            ))),
        }
    }

    /// Refuses to create claims beside those that an application may have changed since an earlier restore
    /// has ended: they would be of different times. One that was interrupted has its temporary objects.
    pub fn refuse_different_times(&self, seen: &[Existing]) -> Result<()> {
        let each = || self.members.iter().zip(seen);
        let names = |is: fn(&Existing) -> bool| -> Vec<_> {
            let found = each().filter(|(_, seen)| is(seen));
            found.map(|(one, _)| one.copy.claim.as_str()).collect()
        };
        let bound = names(Existing::is_bound);
        let absent = names(|seen| seen.claim.is_none() && seen.content.is_none());
        match bound.is_empty() || absent.is_empty() {
            true => Ok(()),
            false => Err(Failure::failed(format!(
                "these claims of namespace {} exist since an earlier restore, and an application may have changed their volumes: {}. The remaining claims would be from a different point in time: {}. Give another --suffix, or restore single members as volumesnapshotcontent/NAME",
                self.namespace(),
                bound.join(", "),
                absent.join(", ")
            ))),
        }
    }

    /// Refuses pods that would start with some of the claims.
    pub async fn refuse_pods(&self, seen: &[Existing]) -> Result<()> {
        if seen.iter().all(|it| it.claim.is_some()) {
            return Ok(());
        }
        let claims: Vec<_> = self.members.iter().map(|it| &*it.copy.claim).collect();
        let scope = Scope::Namespace(self.namespace().into());
        let all = ListParams::default();
        let pods = self.cluster.get_all(&object::POD, &scope, &all).await?;
        stateful_set::refuse_users(&pods, &claims)
    }

    /// The node on which the volume of a copy is created: that of its snapshot. `None` for a class that
    /// chooses it itself.
    pub fn node(&self, copy: &Copy) -> Result<Option<&str>> {
        nodes::get_node_for_volume(&self.nodes, &self.classes, copy, || {
            format!(
                "the snapshot of VolumeSnapshotContent {} is not known: you may have to be allowed to list pools.slackwater.dev",
                copy.snapshot.content
            )
        })
    }

    /// The claim as it is created.
    pub fn claim(&self, copy: &Copy) -> Result<Value> {
        Ok(copy.manifest_on(self.node(copy)?))
    }
}
