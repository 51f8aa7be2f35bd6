//! The state of a restore into another namespace, and what is refused at each of its steps.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use kube::api::ListParams;
use serde_json::Value;

use super::stage::{Stage, target_claim, temporary_claim};
use crate::cli::RestoreArguments;
use crate::cluster::object;
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::restore::nodes::{self, Nodes};
use crate::restore::plan::{self, Copy};
use crate::restore::report;
use crate::restore::source;
use crate::restore::stateful_set::claim_names::Slot;
use crate::restore::stateful_set::{self, StatefulSet};
use crate::restore::storage_class::{self, Classes};
use crate::transfer::execute::Transfer;

/// A restore that has not ended.
pub struct CrossNamespaceRestore<'a> {
    pub cluster: &'a Cluster,
    pub title: String,
    /// The namespace of the new claims.
    pub namespace: &'a str,
    /// The claims that are there to be transferred.
    pub copies: Vec<Copy>,
    /// The StatefulSet that will use the new claims, if it is named, and which of its claims they are.
    pub user: Option<(Vec<Slot>, StatefulSet)>,
    pub classes: Classes,
    pub nodes: Nodes,
    /// Those for which this run has chosen the node. If the provisioner gives the node up, because it has no
    /// room, for example, the same node is not chosen again and again.
    pub chosen: RefCell<BTreeSet<String>>,
    pub arguments: &'a RestoreArguments,
    /// Whether the check has succeeded in this run.
    pub is_checked: Cell<bool>,
}

impl<'a> CrossNamespaceRestore<'a> {
    /// Reads what is to be restored.
    pub async fn read(
        cluster: &'a Cluster,
        arguments: &'a RestoreArguments,
        namespace: &'a str,
    ) -> Result<CrossNamespaceRestore<'a>> {
        if namespace == cluster.namespace {
            return Err(Failure::usage(format!(
                "the snapshot is in namespace {namespace} already: leave out --to-namespace"
            )));
        }
        let source = source::get(cluster, &arguments.source).await?;
        source.refuse_unsized()?;
        if arguments.statefulset.is_some() && arguments.suffix.is_some() {
            return Err(Failure::usage(format!(
                "--suffix cannot be combined with --statefulset and --to-namespace: name the StatefulSet of namespace {namespace} that uses the claims"
            )));
        }
        let user = stateful_set::find(cluster, namespace, arguments.statefulset.as_deref()).await?;
        let mut copies = plan::copies(cluster, &source, user.as_ref(), arguments).await?;
        storage_class::resolve(cluster, &mut copies).await?;
        let classes = storage_class::read(cluster, &copies).await?;
        let nodes = nodes::read_for(cluster, &classes, &copies).await?;
        Ok(CrossNamespaceRestore {
            user: user
                .map(|set| Ok((set.slots(&source.members)?, set)))
                .transpose()?,
            title: source.title,
            chosen: RefCell::default(),
            is_checked: Cell::new(false),
            arguments,
            cluster,
            namespace,
            copies,
            classes,
            nodes,
        })
    }

    pub fn transfer(&self, copy: &Copy, volume: &str) -> Transfer<'a> {
        Transfer {
            cluster: self.cluster,
            from: temporary_claim(self.cluster, copy),
            to: target_claim(copy),
            volume: volume.into(),
        }
    }

    /// Whether the copies are to be checked before the first transfer. Not once one has begun: their
    /// check has succeeded then, or was not requested.
    pub fn is_check_due(&self, stages: &[Stage]) -> bool {
        let begun = |stage: &Stage| matches!(stage, Stage::Transferring(_) | Stage::Transferred(_));
        self.arguments.check.verify.is_some() && !self.is_checked.get() && !stages.iter().any(begun)
    }

    /// Refuses to create copies beside those that an application may have changed since: they would be of
    /// different times. No interruption leaves this, because no transfer begins before all copies exist.
    pub fn refuse_different_times(&self, stages: &[Stage]) -> Result<()> {
        let each = || self.copies.iter().zip(stages);
        let names = |is: fn(&Stage) -> bool| -> Vec<_> {
            let found = each().filter(|(_, stage)| is(stage));
            found
                .map(|(copy, _)| target_claim(copy).to_string())
                .collect()
        };
        let begun = names(|stage| matches!(stage, Stage::Transferring(_) | Stage::Transferred(_)));
        let absent = names(|stage| matches!(stage, Stage::Absent));
        if begun.is_empty() || absent.is_empty() {
            return Ok(());
        }
        Err(Failure::failed(format!(
            "these claims exist since an earlier restore, or their transfer has begun, and an application may have changed their volumes: {}. The remaining claims would be from a different point in time: {}. Give another --suffix, or restore single members by the names of their VolumeSnapshots",
            begun.join(", "),
            absent.join(", ")
        )))
    }

    /// Refuses pods that would start with some of the claims.
    pub async fn refuse_pods(&self, stages: &[Stage]) -> Result<()> {
        let each = self.copies.iter().zip(stages);
        let coming = each.filter(|(_, stage)| !matches!(stage, Stage::Transferred(_)));
        let coming: Vec<_> = coming.map(|(copy, _)| target_claim(copy).name).collect();
        let coming: Vec<_> = coming.iter().map(String::as_str).collect();
        let scope = Scope::Namespace(self.namespace.into());
        let all = ListParams::default();
        let pods = self.cluster.get_all(&object::POD, &scope, &all).await?;
        if let Some((_, set)) = &self.user {
            set.refuse_pods(self.cluster, &pods).await?;
        }
        stateful_set::refuse_users(&pods, &coming)
    }

    /// The node on which the volume of a copy is created: that of its snapshot. `None` for a class that
    /// chooses it itself.
    pub fn node(&self, copy: &Copy) -> Result<Option<&str>> {
        nodes::get_node_for_volume(&self.nodes, &self.classes, copy, || {
            format!(
                "VolumeSnapshot {} is not known, so it cannot be created before it is transferred: you may have to be allowed to list pools.slackwater.dev and volumesnapshotcontents",
                copy.snapshot.name
            )
        })
    }

    /// The claim that is there to be transferred.
    pub fn temporary_manifest(&self, copy: &Copy) -> Result<Value> {
        Ok(copy.manifest_on(self.node(copy)?))
    }

    pub fn ended(&self) -> String {
        let claims = report::count(self.copies.len());
        format!(
            "{} is restored into {claims} of namespace {}.",
            self.title, self.namespace
        )
    }
}
