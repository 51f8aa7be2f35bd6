//! Finds the snapshots that are restored from a deleted namespace: only their contents are left, which have
//! no namespace.

use std::collections::BTreeMap;

use kube::api::{DynamicObject, ListParams};

use super::objects::{RETAIN, Record, record_of, snapshot_name};
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::model::snapshot::{self, Snapshot};
use crate::restore::group_snapshot::{first_names, listed_handles};
use crate::text::after_colon;

/// What the user has named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContentName {
    /// A VolumeSnapshotContent, or the ID of a snapshot.
    Snapshot(String),
    /// A VolumeGroupSnapshotContent, or the ID of a group snapshot.
    Group(String),
}

impl ContentName {
    /// From the argument of `restore`. `None` if it names no content.
    pub fn of(source: &str) -> Option<ContentName> {
        let (kind, name) = source.split_once('/')?;
        match kind.split('.').next().unwrap_or_default() {
            "volumesnapshotcontent" | "volumesnapshotcontents" => {
                Some(ContentName::Snapshot(name.into()))
            }
            "volumegroupsnapshotcontent" | "volumegroupsnapshotcontents" => {
                Some(ContentName::Group(name.into()))
            }
            _ => None,
        }
    }
}

/// A snapshot that is restored.
#[derive(Debug)]
pub struct SourceSnapshot {
    /// Its name is that of the temporary VolumeSnapshot, its UID that of its content, and its claim the old
    /// one, if that is known.
    pub snapshot: Snapshot,
    /// The PersistentVolume of which it was taken, if that exists.
    pub volume: Option<DynamicObject>,
    /// What an earlier run has recorded.
    pub record: Option<Record>,
}

/// What is restored.
#[derive(Debug)]
pub struct Source {
    /// As a message names it.
    pub title: String,
    /// The same for a record.
    pub key: String,
    pub members: Vec<SourceSnapshot>,
}

/// All contents, of which one or several are restored.
struct Contents<'a> {
    cluster: &'a Cluster,
    /// The namespace of the new claims.
    to: &'a str,
    contents: Vec<DynamicObject>,
    groups: Vec<DynamicObject>,
    volumes: Vec<DynamicObject>,
    namespaces: BTreeMap<String, Option<DynamicObject>>,
}

fn refused(title: &str, why: &str) -> Failure {
    Failure::failed(format!("{title} {why}"))
}

fn handle_of(content: &DynamicObject) -> &str {
    match content.text("/status/snapshotHandle") {
        "" => content.text("/spec/source/snapshotHandle"),
        handle => handle,
    }
}

fn group_handle_of(content: &DynamicObject) -> &str {
    match content.text("/status/volumeGroupSnapshotHandle") {
        "" => content.text("/spec/source/groupSnapshotHandles/volumeGroupSnapshotHandle"),
        handle => handle,
    }
}

/// The group of which a content is a member, if it is of one.
fn group_of_member(content: &DynamicObject) -> &str {
    match content.text("/status/volumeGroupSnapshotHandle") {
        "" => content.annotation("groupsnapshot.storage.k8s.io/volumeGroupSnapshotHandle"),
        handle => handle,
    }
}

/// Finds the contents. `to` is the namespace of the new claims.
pub async fn get_source(cluster: &Cluster, which: &ContentName, to: &str) -> Result<Source> {
    let all = ListParams::default();
    let contents = cluster.get_all(&object::SNAPSHOT_CONTENT, &Scope::All, &all);
    let groups = cluster.get_all(&object::GROUP_CONTENT, &Scope::All, &all);
    let volumes = cluster.find(&object::VOLUME, &Scope::All, &all);
    let mut found = Contents {
        cluster,
        to,
        contents: contents.await?,
        groups: groups.await?,
        volumes: volumes.await?.unwrap_or_default(),
        namespaces: BTreeMap::new(),
    };
    match which {
        ContentName::Snapshot(name) => found.snapshot(name).await,
        ContentName::Group(name) => found.group(name).await,
    }
}

/// Whether a VolumeSnapshot reports a group for which there is no content. snapshot-controller never makes
/// it ready.
pub async fn has_no_group(cluster: &Cluster, content: &DynamicObject) -> Result<bool> {
    let handle = content.text("/status/volumeGroupSnapshotHandle");
    if handle.is_empty() {
        return Ok(false);
    }
    let all = ListParams::default();
    let groups = cluster.get_all(&object::GROUP_CONTENT, &Scope::All, &all);
    let groups = groups.await?;
    let reports = |it: &DynamicObject| it.text("/status/volumeGroupSnapshotHandle") == handle;
    Ok(!groups.iter().any(reports))
}

impl Contents<'_> {
    /// Contents of users, as opposed to those of restores.
    fn own(&self) -> impl Iterator<Item = &DynamicObject> {
        self.contents.iter().filter(|it| record_of(it).is_none())
    }

    /// Temporary contents of an earlier run into this namespace.
    fn begun(&self) -> impl Iterator<Item = (&DynamicObject, Record)> {
        let each = self.contents.iter();
        let each = each.filter_map(|it| Some((it, record_of(it)?)));
        each.filter(|(_, record)| record.namespace == self.to)
    }

    async fn snapshot(&mut self, name: &str) -> Result<Source> {
        let by_name = self.own().find(|it| it.name() == name);
        let mut found: Vec<_> = match by_name {
            Some(one) => vec![one.clone()],
            None => self
                .own()
                .filter(|it| handle_of(it) == name)
                .cloned()
                .collect(),
        };
        if found.len() > 1 {
            let names: Vec<_> = found.iter().map(|it| it.name().to_string()).collect();
            return Err(Failure::usage(format!(
                "several VolumeSnapshotContents have the snapshot {name}: give the name of one of them: {}",
                first_names(&names)
            )));
        }
        if let Some(content) = found.pop() {
            let key = format!("volumesnapshotcontent/{}", content.name());
            let title = format!("VolumeSnapshotContent {}", content.name());
            let member = self.member(&content, &title, None).await?;
            return Ok(Source {
                title,
                key,
                members: vec![member],
            });
        }
        // The content was deleted after an earlier run has begun.
        let key = format!("volumesnapshotcontent/{name}");
        let begun: Vec<_> = self
            .begun()
            .filter(|(it, record)| {
                record.source == key || (record.members == 1 && handle_of(it) == name)
            })
            .map(|(content, record)| begun(content, record))
            .collect();
        match begun.first().and_then(|it| it.record.clone()) {
            Some(record) => Ok(Source {
                title: format!("VolumeSnapshotContent {}", record.content),
                key: record.source,
                members: begun,
            }),
            None => Err(Failure::failed(format!(
                "no VolumeSnapshotContent has the name or the handle {name}"
            ))),
        }
    }

    async fn group(&mut self, name: &str) -> Result<Source> {
        let by_name = self.groups.iter().find(|it| it.name() == name);
        let by_handle = || self.groups.iter().find(|it| group_handle_of(it) == name);
        let Some(group) = by_name.or_else(by_handle).cloned() else {
            return self.begun_group(name);
        };
        let title = format!("VolumeGroupSnapshotContent {}", group.name());
        self.check(&group, &title, (&object::GROUP, "volumeGroupSnapshotRef"))
            .await?;
        let handles = listed_handles(&group).map_err(|why| refused(&title, &why))?;
        let mut members = Vec::new();
        for handle in &handles {
            members.push(self.of_handle(handle, &title, &group).await?);
        }
        Ok(Source {
            key: format!("volumegroupsnapshotcontent/{}", group.name()),
            title,
            members,
        })
    }

    /// What is left of a group whose content was deleted after an earlier run has begun.
    fn begun_group(&self, name: &str) -> Result<Source> {
        let key = format!("volumegroupsnapshotcontent/{name}");
        let begun: Vec<_> = self
            .begun()
            .filter(|(_, record)| record.source == key)
            .map(|(content, record)| begun(content, record))
            .collect();
        let all = begun.first().and_then(|it| it.record.as_ref());
        match all.map(|record| record.members) {
            Some(all) if all == begun.len() => Ok(Source {
                title: format!("VolumeGroupSnapshotContent {name}"),
                key,
                members: begun,
            }),
            _ => Err(Failure::failed(format!(
                "no VolumeGroupSnapshotContent has the name or the handle {name}"
            ))),
        }
    }

    /// The member of a group with this handle.
    async fn of_handle(
        &mut self,
        handle: &str,
        title: &str,
        group: &DynamicObject,
    ) -> Result<SourceSnapshot> {
        let reference = |it: &DynamicObject, at: &str| it.text(at).to_string();
        let namespace = reference(group, "/spec/volumeGroupSnapshotRef/namespace");
        let mut of_handle: Vec<_> = self.own().filter(|it| handle_of(it) == handle).collect();
        if of_handle.len() > 1 {
            // One that was imported elsewhere is no member.
            of_handle.retain(|it| reference(it, "/spec/volumeSnapshotRef/namespace") == namespace);
        }
        let names: Vec<_> = of_handle.iter().map(|it| it.name().to_string()).collect();
        if let [content] = of_handle[..] {
            let content = content.clone();
            let title = format!("VolumeSnapshotContent {}, a member,", content.name());
            return self.member(&content, &title, Some(group)).await;
        }
        let mut left = self.begun().filter(|(it, _)| handle_of(it) == handle);
        match (names.is_empty(), left.next()) {
            (true, Some((content, record))) => Ok(begun(content, record)),
            (true, None) => {
                let source = volume_of_member(group, handle);
                let of = match self.claim_of(source, &namespace) {
                    Some((claim, _)) => format!("{handle}, of claim {claim}"),
                    None => format!("{handle}, of volume {source}"),
                };
                Err(refused(
                    title,
                    &format!(
                        "is incomplete: no VolumeSnapshotContent has its snapshot {of}; single members can be restored as volumesnapshotcontent/NAME"
                    ),
                ))
            }
            (false, _) => Err(refused(
                title,
                &format!(
                    "is not clear: several VolumeSnapshotContents have its snapshot {handle}: {}; single members can be restored as volumesnapshotcontent/NAME",
                    first_names(&names)
                ),
            )),
        }
    }

    /// A snapshot with what is known about its claim.
    async fn member(
        &mut self,
        content: &DynamicObject,
        title: &str,
        group: Option<&DynamicObject>,
    ) -> Result<SourceSnapshot> {
        self.check(content, title, (&object::SNAPSHOT, "volumeSnapshotRef"))
            .await?;
        let handle = group_of_member(content);
        let with_handle = |it: &&DynamicObject| !handle.is_empty() && group_handle_of(it) == handle;
        let group = group.or_else(|| self.groups.iter().find(with_handle));
        let mut snapshot = snapshot::of_content(content, group);
        if snapshot.handle.is_empty() || snapshot.restore_bytes <= 0 {
            return Err(refused(
                title,
                "has no status.snapshotHandle or no status.restoreSize, so the size of its copy is not known",
            ));
        }
        snapshot.namespace = self.to.into();
        snapshot.name = snapshot_name(&snapshot.uid);
        let volume = content.text("/spec/source/volumeHandle");
        let of = self.claim_of(volume, content.text("/spec/volumeSnapshotRef/namespace"));
        let (claim, volume) = of.map(|(claim, it)| (claim, it.clone())).unzip();
        snapshot.claim = claim.unwrap_or_default();
        let mut begun = self
            .begun()
            .filter(|(_, record)| record.uid == snapshot.uid);
        Ok(SourceSnapshot {
            record: begun.next().map(|(_, record)| record),
            snapshot,
            volume,
        })
    }

    /// The claim of a volume that a PersistentVolume still names.
    fn claim_of(&self, handle: &str, namespace: &str) -> Option<(String, &DynamicObject)> {
        let mut own = self.volumes.iter().filter(|it| {
            it.text("/spec/csi/driver") == self.cluster.driver
                && !handle.is_empty()
                && it.text("/spec/csi/volumeHandle") == handle
                && it.text("/spec/claimRef/namespace") == namespace
        });
        own.next()
            .map(|it| (it.text("/spec/claimRef/name").to_string(), it))
    }

    /// Refuses contents from which nothing can be restored, or not so.
    async fn check(
        &mut self,
        content: &DynamicObject,
        title: &str,
        (kind, reference): (&Kind, &str),
    ) -> Result<()> {
        let driver = content.text("/spec/driver");
        if driver != self.cluster.driver {
            return Err(refused(title, &format!("is of the driver {driver}")));
        }
        if content.is_being_deleted() {
            return Err(refused(title, "is being deleted"));
        }
        let policy = content.text("/spec/deletionPolicy");
        if policy != RETAIN {
            return Err(refused(
                title,
                &format!(
                    "has the deletionPolicy {policy}: its snapshot may be deleted at any time; set it to {RETAIN} first"
                ),
            ));
        }
        if !content.is_true("/status/readyToUse") {
            let why = after_colon(content.text("/status/error/message"));
            return Err(refused(title, &format!("is not ready{why}")));
        }
        self.check_namespace(content, title, (kind, reference))
            .await
    }

    /// Refuses a content whose namespace is not gone. One of the same name that was created again is
    /// another one: it is younger than the content, and the object that the content names by its UID is not
    /// there.
    async fn check_namespace(
        &mut self,
        content: &DynamicObject,
        title: &str,
        (kind, reference): (&Kind, &str),
    ) -> Result<()> {
        let text = |field: &str| content.text(&format!("/spec/{reference}/{field}"));
        let (namespace, name, uid) = (text("namespace"), text("name"), text("uid"));
        if !self.namespaces.contains_key(namespace) {
            let found = self.cluster.find_one(&object::NAMESPACE, "", namespace);
            let found = found.await?;
            self.namespaces.insert(namespace.into(), found);
        }
        let Some(Some(found)) = self.namespaces.get(namespace) else {
            return Ok(());
        };
        if found.is_being_deleted() {
            return Err(refused(
                title,
                &format!(
                    "is of namespace {namespace}, which is being deleted: wait until it is gone"
                ),
            ));
        }
        let live = self.cluster.find_one(kind, namespace, name).await?;
        if live.is_some_and(|live| live.uid() == uid && !uid.is_empty()) {
            return Err(refused(
                title,
                &format!(
                    "is of {} {namespace}/{name}, which exists: restore that one (kubectl slackwater restore {name} -n {namespace} --to-namespace {})",
                    kind.kind, self.to
                ),
            ));
        }
        let is_younger = match (found.created(), content.created()) {
            (Some(namespace), Some(content)) => namespace > content,
            _ => false,
        };
        match is_younger && !uid.is_empty() {
            true => Ok(()),
            false => Err(refused(
                title,
                &format!(
                    "is of namespace {namespace}, which is not gone: create a VolumeSnapshot of the content there (docs/backup.md), and restore that one"
                ),
            )),
        }
    }
}

/// The volume of which the snapshot of a group was taken.
fn volume_of_member<'a>(group: &'a DynamicObject, handle: &str) -> &'a str {
    let lists = [
        "/status/volumeSnapshotInfoList",
        "/status/volumeSnapshotHandlePairList",
    ];
    let mut each = lists.iter().flat_map(|list| group.list(list));
    let own = each.find(|one| one["snapshotHandle"] == handle);
    own.and_then(|one| one["volumeHandle"].as_str())
        .unwrap_or("?")
}

/// A snapshot from what an earlier run has recorded.
fn begun(content: &DynamicObject, record: Record) -> SourceSnapshot {
    let snapshot = Snapshot {
        namespace: record.namespace.clone(),
        name: snapshot_name(&record.uid),
        uid: record.uid.clone(),
        content: record.content.clone(),
        restore_bytes: record.restore_bytes,
        mode: record.mode.clone(),
        ..snapshot::of_content(content, None)
    };
    SourceSnapshot {
        snapshot,
        volume: None,
        record: Some(record),
    }
}
