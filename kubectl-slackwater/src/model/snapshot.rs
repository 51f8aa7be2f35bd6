//! Snapshots and group snapshots with what they have reached, joined from objects.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};
use serde::Serialize;

use crate::cluster::object::{self, Fields, pool_of};
use crate::cluster::{Cluster, Scope, labeled};
use crate::failure::Result;
use crate::text::quantity;

/// A VolumeSnapshot of the driver.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    pub namespace: String,
    pub name: String,
    pub claim: String,
    /// The VolumeGroupSnapshot of which it is a member.
    pub group: String,
    #[serde(flatten)]
    pub cut: Cut,
    pub ready: bool,
    pub error: String,
    pub restore_bytes: i64,
    pub content: String,
    pub handle: String,
    pub pool: String,
    #[serde(skip)]
    pub uid: String,
    /// The VolumeGroupSnapshot that owns it.
    #[serde(skip)]
    pub group_uid: String,
    #[serde(skip)]
    pub is_being_deleted: bool,
    /// `Filesystem` or `Block`, of the volume of which it was taken; empty if this is not known.
    #[serde(skip)]
    pub mode: String,
}

impl Snapshot {
    /// The name that a copy has by default: that of its claim, or its own if it was imported.
    pub fn base(&self) -> &str {
        match self.claim.as_str() {
            "" => &self.name,
            claim => claim,
        }
    }
}

/// A VolumeGroupSnapshot of the driver.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Group {
    pub namespace: String,
    pub name: String,
    /// The labels that select its claims.
    pub selector: String,
    #[serde(flatten)]
    pub cut: Cut,
    pub ready: bool,
    pub error: String,
    #[serde(skip)]
    pub uid: String,
    #[serde(skip)]
    pub is_being_deleted: bool,
    /// Its VolumeGroupSnapshotContent.
    #[serde(skip)]
    pub content: String,
}

/// What the driver's controller has recorded about a cut.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cut {
    /// The consistency level that it has reached.
    pub level: String,
    /// Why it has not reached a higher one.
    pub reason: String,
    pub cut_at: Option<Timestamp>,
    /// For how many milliseconds it froze file systems, if it did.
    pub frozen_ms: Option<u64>,
    /// For how many milliseconds it held applications, if it did.
    pub held_ms: Option<u64>,
}

fn cut_of(content: Option<&DynamicObject>) -> Cut {
    let Some(content) = content else {
        return Cut::default();
    };
    Cut {
        level: content.annotation("slackwater.dev/level").into(),
        reason: content.annotation("slackwater.dev/reason").into(),
        cut_at: content.annotation("slackwater.dev/cut-at").parse().ok(),
        frozen_ms: content.annotation("slackwater.dev/frozen-ms").parse().ok(),
        held_ms: content.annotation("slackwater.dev/held-ms").parse().ok(),
    }
}

/// What a content alone records about its snapshot: not the claim, and nothing of the VolumeSnapshot, which may
/// be gone. The content of the group has the cut of a member.
pub fn of_content(content: &DynamicObject, group: Option<&DynamicObject>) -> Snapshot {
    let own = cut_of(Some(content));
    let mut cut = match own.level.is_empty() {
        true => cut_of(group),
        false => own,
    };
    let text = |pointer| content.text(pointer).to_string();
    let handle = match content.text("/status/snapshotHandle") {
        "" => content.text("/spec/source/snapshotHandle"),
        handle => handle,
    };
    let taken = i128::from(content.number("/status/creationTime"));
    let taken = Timestamp::from_nanosecond(taken).ok();
    cut.cut_at = cut.cut_at.or(taken.filter(|it| it.as_second() > 0));
    let group = group.map_or("", |group| group.text("/spec/volumeGroupSnapshotRef/name"));
    Snapshot {
        group: group.into(),
        cut,
        ready: content.is_true("/status/readyToUse"),
        error: text("/status/error/message"),
        restore_bytes: content.number("/status/restoreSize"),
        content: content.name().into(),
        handle: handle.into(),
        pool: pool_of(handle).unwrap_or_default().into(),
        uid: content.uid().to_string(),
        is_being_deleted: content.is_being_deleted(),
        mode: text("/spec/sourceVolumeMode"),
        ..Snapshot::default()
    }
}

/// Whether a content refers to this object: namespace, name and UID. What another content records is not
/// about it.
pub fn is_bound(content: &DynamicObject, reference: &str, own: (&str, &str, &str)) -> bool {
    let text = |field: &str| content.text(&format!("{reference}/{field}"));
    let uid = text("uid");
    text("namespace") == own.0 && text("name") == own.1 && (uid.is_empty() || uid == own.2)
}

/// The group that owns a member.
fn owner_of(snapshot: &DynamicObject) -> String {
    let owners = snapshot.metadata.owner_references.iter().flatten();
    let mut groups = owners.filter(|owner| owner.kind == object::GROUP.kind);
    groups
        .next()
        .map(|owner| owner.uid.clone())
        .unwrap_or_default()
}

fn by_name(objects: &Option<Vec<DynamicObject>>) -> BTreeMap<&str, &DynamicObject> {
    let objects = objects.iter().flatten();
    objects.map(|object| (object.name(), object)).collect()
}

/// The groups of a scope, sorted by name.
pub async fn groups(
    cluster: &Cluster,
    scope: &Scope,
    selector: Option<&str>,
) -> Result<Vec<Group>> {
    let params = labeled(selector);
    let Some(groups) = cluster.find(&object::GROUP, scope, &params).await? else {
        return Ok(Vec::new());
    };
    if groups.is_empty() {
        return Ok(Vec::new());
    }
    let all = ListParams::default();
    let contents = cluster
        .find(&object::GROUP_CONTENT, &Scope::All, &all)
        .await?;
    let contents = by_name(&contents);
    let mut found = Vec::new();
    for group in &groups {
        let name = group.text("/status/boundVolumeGroupSnapshotContentName");
        let content = contents.get(name).copied();
        let is_foreign = content.is_some_and(|it| it.text("/spec/driver") != cluster.driver);
        if is_foreign {
            continue;
        }
        let mut cut = cut_of(content);
        cut.cut_at = cut.cut_at.or_else(|| group.time("/status/creationTime"));
        let labels = group.match_labels("/spec/source/selector/matchLabels");
        found.push(Group {
            namespace: group.namespace().into(),
            name: group.name().into(),
            selector: labels.join(","),
            cut,
            ready: group.is_true("/status/readyToUse"),
            error: group.text("/status/error/message").into(),
            uid: group.uid().to_string(),
            is_being_deleted: group.is_being_deleted(),
            content: name.into(),
        });
    }
    Ok(found)
}

/// The snapshots of a scope, the newest first within each namespace.
pub async fn snapshots(
    cluster: &Cluster,
    scope: &Scope,
    selector: Option<&str>,
) -> Result<Vec<Snapshot>> {
    let params = labeled(selector);
    let snapshots = cluster.get_all(&object::SNAPSHOT, scope, &params).await?;
    let all = ListParams::default();
    let contents = cluster
        .find(&object::SNAPSHOT_CONTENT, &Scope::All, &all)
        .await?;
    if contents.is_none() {
        cluster
            .note("levels are not shown, and snapshots of other drivers may be among these".into());
    }
    let contents = by_name(&contents);
    let groups = groups(cluster, scope, None).await?;
    let groups: Groups<'_> = groups
        .iter()
        .map(|group| ((group.namespace.as_str(), group.name.as_str()), group))
        .collect();
    let mut found = Vec::new();
    for snapshot in &snapshots {
        let name = snapshot.text("/status/boundVolumeSnapshotContentName");
        let own = (snapshot.namespace(), snapshot.name(), snapshot.uid());
        let is_its = |it: &&DynamicObject| is_bound(it, "/spec/volumeSnapshotRef", own);
        let content = contents.get(name).copied().filter(is_its);
        let is_foreign = content.is_some_and(|it| it.text("/spec/driver") != cluster.driver);
        if !is_foreign {
            found.push(joined(snapshot, content, &groups));
        }
    }
    found.sort_by(|a, b| {
        let key = |s: &Snapshot| {
            (
                s.namespace.clone(),
                std::cmp::Reverse(s.cut.cut_at),
                s.name.clone(),
            )
        };
        key(a).cmp(&key(b))
    });
    Ok(found)
}

/// Groups by namespace and name.
type Groups<'a> = BTreeMap<(&'a str, &'a str), &'a Group>;

fn joined(
    snapshot: &DynamicObject,
    content: Option<&DynamicObject>,
    groups: &Groups<'_>,
) -> Snapshot {
    let mut cut = cut_of(content);
    let group = snapshot.text("/status/volumeGroupSnapshotName");
    if let Some(group) = groups.get(&(snapshot.namespace(), group))
        && cut.level.is_empty()
    {
        cut = group.cut.clone();
    }
    cut.cut_at = cut.cut_at.or_else(|| snapshot.time("/status/creationTime"));
    let of_content = |pointer| content.map_or("", |content| content.text(pointer));
    let handle = of_content("/status/snapshotHandle");
    let text = |pointer| snapshot.text(pointer).to_string();
    Snapshot {
        namespace: snapshot.namespace().into(),
        name: snapshot.name().into(),
        claim: text("/spec/source/persistentVolumeClaimName"),
        group: group.into(),
        cut,
        ready: snapshot.is_true("/status/readyToUse"),
        error: text("/status/error/message"),
        restore_bytes: quantity(snapshot.text("/status/restoreSize")).unwrap_or_default(),
        content: text("/status/boundVolumeSnapshotContentName"),
        handle: handle.into(),
        pool: pool_of(handle).unwrap_or_default().into(),
        uid: snapshot.uid().to_string(),
        group_uid: owner_of(snapshot),
        is_being_deleted: snapshot.is_being_deleted(),
        mode: of_content("/spec/sourceVolumeMode").into(),
    }
}
