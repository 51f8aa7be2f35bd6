//! With which members a revert begins, or why it is refused, now or for good.

use std::collections::BTreeSet;

use ::kube::ResourceExt;
use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind};
use serde_json::Value;

use super::decide::Refusal;
use super::object::{MemberState, RevertMember, VolumeRevert};
use super::read::{Reader, is_ready, snapshots_api, text};
use crate::error::{Result, chain};
use crate::model::{SnapshotId, VolumeId};
use crate::operation::VolumeRevertStatus;
use crate::router::kube::{ask, snapshot_contents};

/// The annotation of the class that VolumeSnapshots without a class get.
const DEFAULT_CLASS: &str = "snapshot.storage.kubernetes.io/is-default-class";

pub(super) type Refused<T> = std::result::Result<T, Refusal>;

/// Something that may change until the deadline.
fn not_yet<T>(reason: &'static str, message: impl Into<String>) -> Refused<T> {
    let message = message.into();
    Err(Refusal {
        reason,
        message,
        is_final: false,
    })
}

fn never<T>(reason: &'static str, message: impl Into<String>) -> Refused<T> {
    let message = message.into();
    Err(Refusal {
        reason,
        message,
        is_final: true,
    })
}

impl Reader<'_> {
    /// What a revert would begin with.
    pub(super) async fn propose(
        &self,
        object: &VolumeRevert,
    ) -> Result<Refused<Vec<RevertMember>>> {
        if let Err(why) = object.deadline() {
            return Ok(never("InvalidDeadline", why));
        }
        let spec = &object.spec;
        let named = match (&spec.claim, &spec.snapshot, &spec.group_snapshot) {
            (Some(claim), Some(snapshot), None) => {
                Ok((vec![(Some(claim.clone()), snapshot.clone())], None))
            }
            (None, None, Some(group)) => self.members_of(group).await?,
            _ => never(
                "InvalidSpec",
                "give either claim and snapshot, or groupSnapshot",
            ),
        };
        let (named, group) = match named {
            Ok(named) => named,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let mut members: Vec<RevertMember> = Vec::new();
        for (claim, snapshot) in named {
            match self.plan(object, claim, snapshot).await? {
                Ok(member) => members.push(member),
                Err(refusal) => return Ok(Err(refusal)),
            }
        }
        if let Some(refusal) = group.and_then(|group| incomplete(&group, &members)) {
            return Ok(Err(refusal));
        }
        if object.spec.keep_old && members.iter().any(|member| member.class.is_none()) {
            // Members of a group snapshot have no class.
            let class = match self.class().await {
                Ok(class) => class,
                Err(refusal) => return Ok(Err(refusal)),
            };
            for member in &mut members {
                member.class.get_or_insert_with(|| class.clone());
            }
        }
        let handles: BTreeSet<&String> = members.iter().map(|member| &member.handle).collect();
        Ok(
            match handles.len() == members.len() && !members.is_empty() {
                true => Ok(members),
                false => never("InvalidSpec", "two of its members are the same volume"),
            },
        )
    }

    /// A VolumeSnapshotClass of the driver: the default one, or the first by name.
    async fn class(&self) -> Refused<String> {
        let cluster = &self.controller.cluster;
        let kind = "VolumeSnapshotClass";
        let api = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind);
        let api = ApiResource::from_gvk(&api);
        let api = Api::<DynamicObject>::all_with(cluster.client.clone(), &api);
        let listed = ask("VolumeSnapshotClasses", api.list(&ListParams::default())).await;
        let listed = match listed {
            Ok(listed) => listed.items,
            Err(error) => return not_yet("ClassesUnknown", chain(&error)),
        };
        let driver = cluster.options.driver.as_str();
        let is_ours = |class: &&DynamicObject| text(class, "/driver") == Some(driver);
        let ours = listed.iter().filter(is_ours);
        let is_default = |class: &DynamicObject| {
            let mark = class.annotations().get(DEFAULT_CLASS);
            mark.is_some_and(|mark| mark == "true")
        };
        let class = ours.min_by_key(|class| (!is_default(class), class.name_any()));
        match class {
            Some(class) => Ok(class.name_any()),
            None => not_yet(
                "NoClass",
                format!(
                    "there is no {kind} of driver {driver}, which the VolumeSnapshots of keepOld need"
                ),
            ),
        }
    }

    /// The VolumeSnapshots of a group, and the IDs of all snapshots that it has.
    async fn members_of(&self, group: &str) -> Result<Refused<(Vec<Named>, Option<Handles>)>> {
        let Some((contents, content)) = self.content_of_group(group).await? else {
            let why = format!("VolumeGroupSnapshot {group} does not exist or is not ready");
            return Ok(not_yet("GroupNotReady", why));
        };
        let client = self.controller.cluster.client.clone();
        let api = Api::<DynamicObject>::all_with(client, &contents);
        let what = format!("{} {content}", contents.kind);
        let found = ask(&what, api.get_opt(&content)).await?;
        let handles = found.as_ref().map(handles_of).unwrap_or_default();
        if handles.is_empty() {
            let why = format!("the snapshots of VolumeGroupSnapshot {group} are not known");
            return Ok(never("GroupUnknown", why));
        }
        let all = self.namespaced(&snapshots_api());
        let all = ask("VolumeSnapshots", all.list(&ListParams::default())).await?;
        let of_group =
            |one: &&DynamicObject| text(one, "/status/volumeGroupSnapshotName") == Some(group);
        let named = all.items.iter().filter(of_group);
        let claim = |one: &&DynamicObject| {
            let claim = text(one, "/spec/source/persistentVolumeClaimName");
            (claim.map(String::from), one.name_any())
        };
        let named = named.map(|one| claim(&one)).collect();
        Ok(Ok((named, Some(handles))))
    }

    /// The kind and the name of the content of a group that is ready.
    async fn content_of_group(&self, group: &str) -> Result<Option<(ApiResource, String)>> {
        for kind in snapshot_contents::group_contents() {
            let of = GroupVersionKind::gvk(&kind.group, &kind.version, "VolumeGroupSnapshot");
            let api = self.namespaced(&ApiResource::from_gvk(&of));
            let what = format!("VolumeGroupSnapshot {group}");
            let Some(found) = ask(&what, api.get_opt(group)).await? else {
                continue;
            };
            let content = text(&found, "/status/boundVolumeGroupSnapshotContentName");
            return Ok(content.filter(|_| is_ready(&found)).map(|content| {
                let contents = ApiResource::from_gvk(&kind);
                (contents, content.to_string())
            }));
        }
        Ok(None)
    }

    /// One member, if its volume can have the content of its snapshot.
    async fn plan(
        &self,
        object: &VolumeRevert,
        claim: Option<String>,
        snapshot: String,
    ) -> Result<Refused<RevertMember>> {
        let source = match self.snapshot(&snapshot).await? {
            Ok(source) => source,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(claim) = claim else {
            let why = format!("VolumeSnapshot {snapshot} names no claim");
            return Ok(never("NoClaim", why));
        };
        let Some(found) = self.claim(&claim).await? else {
            return Ok(not_yet(
                "NoClaim",
                format!("claim {claim} does not exist; create it from the snapshot instead"),
            ));
        };
        let claim_uid = found.metadata.uid.clone().unwrap_or_default();
        let volume = found.spec.and_then(|spec| spec.volume_name);
        let volume = volume.unwrap_or_default();
        let handle = match volume.is_empty() {
            true => None,
            false => self.handle(&volume, &claim_uid).await?,
        };
        let Some(handle) = handle else {
            let why = format!("claim {claim} is not bound to a volume of this driver");
            return Ok(not_yet("NotBound", why));
        };
        let (Ok(id), Ok(of)) = (
            handle.parse::<VolumeId>(),
            source.handle.parse::<SnapshotId>(),
        ) else {
            let why = format!("the IDs of claim {claim} and its snapshot are not of this driver");
            return Ok(never("UnknownId", why));
        };
        if id.pool != of.pool {
            let why = format!(
                "VolumeSnapshot {snapshot} is in another pool than claim {claim}; create a new claim from it"
            );
            return Ok(never("OtherPool", why));
        }
        if let Some(other) = self.other(object, &handle) {
            let why = format!("VolumeRevert {other} reverts claim {claim}");
            return Ok(not_yet("OtherRevert", why));
        }
        let found = match self.controller.volumes.look(id, of).await {
            Ok(found) => found,
            Err(error) => return Ok(not_yet("AgentUnknown", chain(&error))),
        };
        Ok(fitting(&claim, &found).map(|()| RevertMember {
            claim,
            claim_uid,
            volume,
            handle,
            snapshot,
            snapshot_handle: source.handle,
            class: source.class,
            number: found.number,
            state: MemberState::Waiting,
            old: None,
        }))
    }

    /// Another revert of the same volume that has not ended.
    fn other(&self, object: &VolumeRevert, handle: &str) -> Option<String> {
        let others = self.controller.cluster.reverts().into_values();
        let mut others = others.filter(|other| {
            let status = other.status.clone().unwrap_or_default();
            let mut members = status.members.iter();
            other.metadata.uid != object.metadata.uid
                && !status.phase.is_final()
                && members.any(|member| member.handle == handle)
        });
        others.next().map(|other| other.path())
    }

    /// What a VolumeSnapshot that is ready names.
    async fn snapshot(&self, name: &str) -> Result<Refused<Source>> {
        let api = self.namespaced(&snapshots_api());
        let what = format!("VolumeSnapshot {name}");
        let Some(found) = ask(&what, api.get_opt(name)).await? else {
            return Ok(not_yet("NoSnapshot", format!("{what} does not exist")));
        };
        let content = text(&found, "/status/boundVolumeSnapshotContentName");
        let Some(content) = content.filter(|_| is_ready(&found)) else {
            return Ok(not_yet("SnapshotNotReady", format!("{what} is not ready")));
        };
        let client = self.controller.cluster.client.clone();
        let contents = ApiResource::from_gvk(&snapshot_contents::snapshot_contents());
        let contents = Api::<DynamicObject>::all_with(client, &contents);
        let its = format!("VolumeSnapshotContent {content}");
        let Some(of) = ask(&its, contents.get_opt(content)).await? else {
            return Ok(not_yet("SnapshotNotReady", format!("{its} does not exist")));
        };
        let driver = self.controller.cluster.options.driver.as_str();
        if text(&of, "/spec/driver") != Some(driver) {
            return Ok(never(
                "OtherDriver",
                format!("{what} belongs to another driver"),
            ));
        }
        // A content that names another VolumeSnapshot is not that of this one.
        if text(&of, "/spec/volumeSnapshotRef/uid") != found.metadata.uid.as_deref() {
            return Ok(never(
                "NotBound",
                format!("{its} is bound to another VolumeSnapshot"),
            ));
        }
        let Some(handle) = text(&of, "/status/snapshotHandle") else {
            return Ok(not_yet(
                "SnapshotNotReady",
                format!("{its} has no snapshot"),
            ));
        };
        let class = text(&found, "/spec/volumeSnapshotClassName");
        Ok(Ok(Source {
            handle: handle.to_string(),
            class: class.map(String::from),
        }))
    }
}

/// What a VolumeSnapshot names.
struct Source {
    /// The ID of the snapshot.
    handle: String,
    class: Option<String>,
}

/// A claim, if it is known, and a VolumeSnapshot of it.
type Named = (Option<String>, String);
/// IDs of snapshots.
type Handles = BTreeSet<String>;

/// The IDs of all snapshots of a group, as its content has them, in any version of its API.
fn handles_of(content: &DynamicObject) -> Handles {
    let of = |path| content.data.pointer(path).and_then(Value::as_array);
    let lists = [
        "/status/volumeSnapshotInfoList",
        "/status/volumeSnapshotHandlePairList",
    ];
    let listed = lists.into_iter().filter_map(of).flatten();
    let listed = listed.filter_map(|one| one.get("snapshotHandle"));
    let imported = of("/spec/source/groupSnapshotHandles/volumeSnapshotHandles");
    let all = listed.chain(imported.into_iter().flatten());
    all.filter_map(Value::as_str).map(String::from).collect()
}

/// Why these are not the members of the group: a snapshot without a VolumeSnapshot, or one of another
/// group whose VolumeSnapshot names this one.
fn incomplete(group: &Handles, members: &[RevertMember]) -> Option<Refusal> {
    let found: BTreeSet<&String> = members.iter().map(|it| &it.snapshot_handle).collect();
    let differing = group.iter().filter(|handle| !found.contains(handle));
    let foreign = found.iter().filter(|handle| !group.contains(**handle));
    let differing: Vec<_> = differing.chain(foreign.copied()).cloned().collect();
    let why = format!(
        "the VolumeSnapshots of the group are not those of all of its snapshots; they differ in {}",
        differing.join(", ")
    );
    (!differing.is_empty()).then_some(Refusal {
        reason: "GroupIncomplete",
        message: why,
        is_final: false,
    })
}

fn fitting(claim: &str, found: &VolumeRevertStatus) -> Refused<()> {
    if !found.exists {
        return never(
            "VolumeGone",
            format!("the volume of claim {claim} does not exist"),
        );
    }
    match &found.unfit {
        Some(unfit) => never("SnapshotUnfit", format!("claim {claim}: {unfit}")),
        None => Ok(()),
    }
}
