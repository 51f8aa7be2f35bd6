//! A restore into another namespace. A claim can be restored only from a snapshot of its own namespace,
//! so each copy is created there under a name of its own, and transferred when the volumes of all copies
//! exist ([`crate::transfer`]).
//!
//! What is to be done is decided from what exists: the claim that is there to be transferred has the UID
//! of its snapshot in its name and the claim that it becomes in an annotation, the PersistentVolume has the
//! record of the transfer, and the new claim has the name of the former one in an annotation. So a command
//! that was interrupted anywhere is repeated.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Write as _;

use kube::api::{DynamicObject, ListParams};
use serde_json::{Value, json};

use super::class::{self, Classes, is_immediate};
use super::names::Slot;
use super::nodes::{self, Nodes};
use super::plan::{self, Copy, SELECTED_NODE, State};
use super::report::{self, is_for_people};
use super::stage::{self, Stage, from, has_ended, to};
use super::stateful::{self, Stateful};
use super::{source, wait};
use crate::change::{Need, Progress, confirm, create, mark, patch, require, say};
use crate::cli::{Change, Format, RestoreArguments};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::listing;
use crate::object::{self, Fields, Kind};
use crate::text::escaped;
use crate::transfer::work::{Transfer, manifest, namespace_hindrance};
use crate::transfer::{self, Way};

/// A restore on its way.
pub struct Across<'a> {
    cluster: &'a Cluster,
    title: String,
    /// The namespace of the new claims.
    namespace: &'a str,
    /// The claims that are there to be transferred.
    copies: Vec<Copy>,
    /// The StatefulSet that will use the new claims, if it is named, and which of its claims they are.
    user: Option<(Vec<Slot>, Stateful)>,
    classes: Classes,
    nodes: Nodes,
    /// Those for which this run has chosen the node. If the provisioner gives the node up, because it has no
    /// room, for example, the same node is not chosen again and again.
    chosen: RefCell<BTreeSet<String>>,
}

/// Restores into another namespace.
pub async fn run(cluster: &Cluster, arguments: &RestoreArguments, namespace: &str) -> Result<()> {
    let across = Across::read(cluster, arguments, namespace).await?;
    let stages = stage::look(cluster, &across.copies).await?;
    let format = arguments.output.format;
    if has_ended(&stages) {
        if is_for_people(format) {
            say(&across.ended());
        }
        return across.print(&stages, format);
    }
    let kept = across.refuse(&stages).await?;
    require(cluster, &across.needs()).await?;
    across.confirm(arguments, &stages, &kept)?;
    across.try_out(&stages, &arguments.change, format).await?;
    if arguments.change.dry_run {
        return across.print(&stages, format);
    }
    let last = wait::until_end_of_steps(&arguments.wait, || across.advance()).await?;
    match is_for_people(format) {
        true => {
            say(&last);
            if let Some((slots, set)) = &across.user {
                say(&set.advice(slots, None));
            }
        }
        false => across.print(&stage::look(cluster, &across.copies).await?, format)?,
    }
    Ok(())
}

impl<'a> Across<'a> {
    /// Reads what is to be restored.
    pub async fn read(
        cluster: &'a Cluster,
        arguments: &RestoreArguments,
        namespace: &'a str,
    ) -> Result<Across<'a>> {
        if namespace == cluster.namespace {
            return Err(Failure::usage(format!(
                "the snapshot is in namespace {namespace} already: leave out --to-namespace"
            )));
        }
        let source = source::find(cluster, &arguments.source).await?;
        source.refuse_unsized()?;
        if arguments.statefulset.is_some() && arguments.suffix.is_some() {
            return Err(Failure::usage(format!(
                "--suffix cannot be combined with --statefulset and --to-namespace: name the StatefulSet of namespace {namespace} that uses the claims"
            )));
        }
        let user = stateful::find(cluster, namespace, arguments.statefulset.as_deref()).await?;
        let mut copies = plan::copies(cluster, &source, user.as_ref(), arguments).await?;
        class::resolve(cluster, &mut copies).await?;
        let classes = class::read(cluster, &copies).await?;
        let nodes = match copies.iter().all(|copy| is_immediate(&classes, copy)) {
            true => None,
            false => nodes::read(cluster).await?,
        };
        Ok(Across {
            user: user
                .map(|set| Ok((set.slots(&source.members)?, set)))
                .transpose()?,
            title: source.title,
            chosen: RefCell::default(),
            cluster,
            namespace,
            copies,
            classes,
            nodes,
        })
    }

    fn transfer(&self, copy: &Copy, volume: &str) -> Transfer<'a> {
        Transfer {
            cluster: self.cluster,
            from: from(self.cluster, copy),
            to: to(copy),
            volume: volume.into(),
        }
    }

    /// Refuses what would fail later. Returns the claims of the StatefulSet that no member restores, and
    /// that are kept.
    async fn refuse(&self, stages: &[Stage]) -> Result<Vec<String>> {
        self.refuse_mix(stages)?;
        if let Some(why) = namespace_hindrance(self.cluster, self.namespace).await? {
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

    /// Refuses to create copies beside those that an application may have changed since: they would be of
    /// different times. No interruption leaves this, because no transfer begins before all copies exist.
    fn refuse_mix(&self, stages: &[Stage]) -> Result<()> {
        let each = || self.copies.iter().zip(stages);
        let names = |is: fn(&Stage) -> bool| -> Vec<_> {
            let found = each().filter(|(_, stage)| is(stage));
            found.map(|(copy, _)| to(copy).to_string()).collect()
        };
        let begun = names(|stage| matches!(stage, Stage::Moving(_) | Stage::Arrived(_)));
        let absent = names(|stage| matches!(stage, Stage::Absent));
        if begun.is_empty() || absent.is_empty() {
            return Ok(());
        }
        Err(Failure::failed(format!(
            "these claims exist since an earlier restore, or their transfer has begun, and an application may have changed their volumes: {}. The others would be of another time: {}. Give another --suffix, or restore single members by the names of their VolumeSnapshots",
            begun.join(", "),
            absent.join(", ")
        )))
    }

    /// Refuses pods that would start with some of the claims.
    async fn refuse_pods(&self, stages: &[Stage]) -> Result<()> {
        let each = self.copies.iter().zip(stages);
        let coming = each.filter(|(_, stage)| !matches!(stage, Stage::Arrived(_)));
        let coming: Vec<_> = coming.map(|(copy, _)| to(copy).name).collect();
        let coming: Vec<_> = coming.iter().map(String::as_str).collect();
        let scope = Scope::Namespace(self.namespace.into());
        let all = ListParams::default();
        let pods = self.cluster.get_all(&object::POD, &scope, &all).await?;
        if let Some((_, set)) = &self.user {
            set.refuse_pods(self.cluster, &pods).await?;
        }
        stateful::refuse_users(&pods, &coming)
    }

    /// The node on which the volume of a copy is created: that of its snapshot. `None` for a class that
    /// chooses it itself.
    fn node(&self, copy: &Copy) -> Result<Option<&str>> {
        if is_immediate(&self.classes, copy) {
            return Ok(None);
        }
        match nodes::of_snapshot(&self.nodes, copy) {
            Some(node) => Ok(Some(node)),
            None => Err(Failure::failed(format!(
                "a volume of class {} is created for a pod (volumeBindingMode WaitForFirstConsumer), and the node of VolumeSnapshot {} is not known, so it cannot be created before it is transferred: you may have to be allowed to list pools.slackwater.dev and volumesnapshotcontents; or give a --storage-class with volumeBindingMode Immediate",
                copy.class, copy.snapshot.name
            ))),
        }
    }

    /// All permissions of all steps.
    fn needs(&self) -> Vec<Need<'_>> {
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
        let need = |(verb, kind, namespace)| Need {
            verb,
            kind,
            namespace,
            name: "",
        };
        verbs.into_iter().map(need).collect()
    }

    /// The copies as they will be, with how far they are.
    fn shown(&self, stages: &[Stage]) -> Vec<Copy> {
        let each = self.copies.iter().zip(stages);
        let each = each.map(|(copy, stage)| {
            let (state, volume) = match stage {
                Stage::Absent => (State::Planned, ""),
                Stage::Unbound(_) => (State::Exists, ""),
                Stage::Bound(volume) | Stage::Moving(volume) => (State::Exists, volume.as_str()),
                Stage::Arrived(volume) => (State::Bound, volume.as_str()),
            };
            let mut shown = copy.clone();
            (shown.claim, shown.volume) = (to(copy).name, volume.into());
            shown.state = state;
            shown
        });
        each.collect()
    }

    fn print(&self, stages: &[Stage], format: Format) -> Result<()> {
        match is_for_people(format) {
            true => Ok(()),
            false => report::print(self.cluster, self.namespace, &self.shown(stages), format),
        }
    }

    /// Prints the plan. Programs get it as they get the result.
    fn confirm(
        &self,
        arguments: &RestoreArguments,
        stages: &[Stage],
        kept: &[String],
    ) -> Result<()> {
        let (format, change) = (arguments.output.format, &arguments.change);
        if !is_for_people(format) {
            if change.yes || change.dry_run {
                return Ok(());
            }
            self.print(stages, format)?;
            return Err(Failure::unconfirmed());
        }
        for note in listing::notes(&self.cluster.take_notes()) {
            eprintln!("{note}");
        }
        let mut plan = format!(
            "{} will be restored into claims of namespace {}:\n{}",
            self.title,
            self.namespace,
            report::plan(&self.shown(stages), format)
        );
        let former: Vec<_> = self.copies.iter().map(|copy| copy.claim.as_str()).collect();
        let _ = write!(
            plan,
            "\nThey are created as {} in namespace {} first, and are transferred when all volumes exist.",
            former.join(", "),
            self.cluster.namespace
        );
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
        confirm(change, &plan)
    }

    /// The claim that is there to be transferred.
    fn former(&self, copy: &Copy) -> Result<Value> {
        let mut copy = copy.clone();
        if let Some(node) = self.node(&copy)?.map(str::to_string) {
            copy.select(&node);
        }
        Ok(copy.manifest())
    }

    /// Lets the API server check the new claims, and with --dry-run also the others: a quota or a policy of
    /// the other namespace may refuse them.
    async fn try_out(&self, stages: &[Stage], change: &Change, format: Format) -> Result<()> {
        let dry = Change {
            yes: true,
            dry_run: true,
        };
        let mark = mark(&dry);
        for (copy, stage) in self.copies.iter().zip(stages) {
            if !matches!(stage, Stage::Absent) {
                continue;
            }
            let (from, to, former) = (from(self.cluster, copy), to(copy), self.former(copy)?);
            let like: DynamicObject = serde_json::from_value(former.clone())
                .map_err(|error| Failure::failed(format!("claim {from}: {error}")))?;
            if change.dry_run {
                create(self.cluster, &dry, &object::CLAIM, &from.namespace, former).await?;
            }
            let new = manifest(&from, &to, &copy.claim, &like);
            create(self.cluster, &dry, &object::CLAIM, &to.namespace, new).await?;
            if change.dry_run && is_for_people(format) {
                say(&format!(
                    "persistentvolumeclaim/{} created{mark}",
                    from.name
                ));
                say(&format!("claim {from} transferred to {to}{mark}"));
            }
        }
        Ok(())
    }

    /// Takes steps until a controller has to do something, or until the end.
    pub async fn advance(&self) -> Result<Progress> {
        let change = Change {
            yes: true,
            dry_run: false,
        };
        loop {
            let stages = stage::look(self.cluster, &self.copies).await?;
            self.refuse_mix(&stages)?;
            if self.create(&stages, &change).await? {
                continue;
            }
            if let Some(progress) = self.wait(&stages, &change).await? {
                return Ok(progress);
            }
            if let Some(progress) = self.transfer_all(stages).await? {
                return Ok(progress);
            }
            return Ok(Progress::Ended(Ok(self.ended())));
        }
    }

    fn ended(&self) -> String {
        let claims = match self.copies.len() {
            1 => "1 claim".to_string(),
            many => format!("{many} claims"),
        };
        format!(
            "{} is restored into {claims} of namespace {}.",
            self.title, self.namespace
        )
    }

    /// Transfers one claim after the other. `None` if all have arrived.
    async fn transfer_all(&self, mut stages: Vec<Stage>) -> Result<Option<Progress>> {
        for (at, copy) in self.copies.iter().enumerate() {
            let volume = match &stages[at] {
                Stage::Bound(volume) => {
                    self.refuse_pods(&stages).await?;
                    volume.clone()
                }
                Stage::Moving(volume) => volume.clone(),
                _ => continue,
            };
            match transfer::advance(&self.transfer(copy, &volume), Way::There).await? {
                Progress::Ended(Ok(line)) => eprintln!("{}", escaped(&line)),
                other => return Ok(Some(other)),
            }
            stages[at] = Stage::Arrived(volume);
        }
        Ok(None)
    }

    /// Creates the claims that are missing. `false` if none is.
    async fn create(&self, stages: &[Stage], change: &Change) -> Result<bool> {
        let mut is_any = false;
        for (copy, stage) in self.copies.iter().zip(stages) {
            if !matches!(stage, Stage::Absent) {
                continue;
            }
            let namespace = &self.cluster.namespace;
            let claim = self.former(copy)?;
            create(self.cluster, change, &object::CLAIM, namespace, claim).await?;
            self.chosen.borrow_mut().insert(copy.claim.clone());
            eprintln!("claim {namespace}/{} is created", escaped(&copy.claim));
            is_any = true;
        }
        Ok(is_any)
    }

    /// Has volumes created that do not exist yet. `None` if all exist.
    async fn wait(&self, stages: &[Stage], change: &Change) -> Result<Option<Progress>> {
        let mut coming = None;
        let mut exist = stages.len();
        for (copy, stage) in self.copies.iter().zip(stages) {
            let Stage::Unbound(claim) = stage else {
                continue;
            };
            exist -= 1;
            coming.get_or_insert(copy.claim.as_str());
            let node = self.node(copy)?;
            let Some(node) = node.filter(|_| claim.annotation(SELECTED_NODE).is_empty()) else {
                continue;
            };
            if !self.chosen.borrow_mut().insert(copy.claim.clone()) {
                let why = wait::last_event(self.cluster, &copy.claim).await?;
                return Err(Failure::failed(format!(
                    "the volume of claim {}/{} cannot be created on node {node} now ({why}); run the command again to try it again, or give a --storage-class with volumeBindingMode Immediate after you have deleted the claim",
                    self.cluster.namespace, copy.claim
                )));
            }
            let fields = json!({"metadata": {"annotations": {SELECTED_NODE: node}}});
            match patch(self.cluster, change, &object::CLAIM, claim, fields).await {
                Err(failure) if !failure.is_conflict => return Err(failure),
                // It is read again.
                Err(_) => {
                    self.chosen.borrow_mut().remove(&copy.claim);
                }
                Ok(_) => {}
            }
        }
        let Some(claim) = coming else {
            return Ok(None);
        };
        let message = wait::last_event(self.cluster, claim).await?;
        Ok(Some(Progress::Running(format!(
            "{exist} of {} volumes exist; claim {claim}: {message}",
            stages.len()
        ))))
    }
}
