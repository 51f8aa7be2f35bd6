//! What adopts an orphan, as a pure function of what the cluster has.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::objects::{Content, OrphanKind, Pair, content_of, pair};
use crate::cli::adopt::AdoptArguments;
use crate::cluster::object::{Fields, pool_of};
use crate::failure::{Failure, Result};
use crate::model::{Move, Pool};
use crate::text::as_quantity;
use crate::transfer::step::NamespacedName;

/// The result of an older check is not used: something may have named the orphan since, or deleted it.
const MAX_AGE: SignedDuration = SignedDuration::from_mins(30);
/// File systems that the driver creates.
const FILE_SYSTEMS: [&str; 3] = ["ext4", "xfs", "btrfs"];
/// How to do by hand what this command refuses.
const BY_HAND: &str = "docs/backup.md#use-an-existing-volume-or-snapshot";

/// What the cluster has.
#[derive(Debug)]
pub struct View {
    pub driver: String,
    /// The time of the API server.
    pub now: Timestamp,
    pub pools: Vec<DynamicObject>,
    /// PersistentVolumes or VolumeSnapshotContents.
    pub owners: Vec<DynamicObject>,
    /// VolumeMoves.
    pub moves: Vec<DynamicObject>,
}

/// An orphan, or one that an earlier run has begun to adopt.
#[derive(Clone, Debug, PartialEq)]
pub struct Adoption {
    pub id: String,
    /// The pool, for people.
    pub pool: String,
    /// Its size and its file system, for people, after its ID; empty if they are not known.
    pub what: String,
    pub orphan_kind: &'static OrphanKind,
    /// The claim or the VolumeSnapshot.
    pub place: NamespacedName,
    /// The place was not given: the record of the volume has it.
    pub is_recorded: bool,
    /// The group of a snapshot; empty if it has none.
    pub group: String,
    pub pair: Pair,
    /// The PersistentVolume or VolumeSnapshotContent that an earlier run has created.
    pub owner: Option<Owner>,
    /// The StorageClass of a PersistentVolume that is still to be created, if it exists.
    pub class: Option<DynamicObject>,
}

impl Adoption {
    /// As the provisioner does: a new PersistentVolume has the mount options of its class.
    pub fn set_mount_options(&mut self) {
        let spec = &mut self.pair.owner["spec"];
        let class = self.class.as_ref();
        let options = class.map_or(&[][..], |class| class.list("/mountOptions"));
        if spec["volumeMode"] == "Filesystem" && !options.is_empty() {
            spec["mountOptions"] = json!(options);
        }
    }
}

/// A PersistentVolume or VolumeSnapshotContent that names the orphan.
#[derive(Clone, Debug, PartialEq)]
pub struct Owner {
    /// The UID of the claim or VolumeSnapshot that is bound to it; empty if none is.
    pub bound_to: String,
}

/// What is still to be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingObjects {
    pub owner: bool,
    pub user: bool,
}

fn refused(id: &str, why: String) -> Failure {
    Failure::failed(format!("{id} is not adopted: {why}"))
}

/// What is to be created for an orphan, or why it is not adopted.
pub fn get_adoption(arguments: &AdoptArguments, view: &View) -> Result<Adoption> {
    let id = arguments.adopt.as_deref().unwrap_or_default();
    let orphan_kind = match &arguments.new_snapshot {
        Some(_) => &OrphanKind::SNAPSHOT,
        None => &OrphanKind::VOLUME,
    };
    let Some((pool_id, uuid)) = pool_of(id).zip(id.split_once('.').map(|(_, uuid)| uuid)) else {
        return Err(Failure::usage(format!(
            "{id:?} is no ID of a volume or snapshot; `kubectl slackwater orphans` has those that can be adopted"
        )));
    };
    let object = pool(view, pool_id).map_err(|why| refused(id, why))?;
    let name = match &arguments.owner {
        Some(name) => name.clone(),
        None => format!("adopted-{uuid}"),
    };
    let existing =
        owner(arguments, view, orphan_kind, (id, &name)).map_err(|why| refused(id, why))?;
    match existing {
        Some((owner, object_of_owner)) => Ok(from_existing(
            object_of_owner,
            owner,
            (id, orphan_kind, object),
        )),
        None => new(arguments, view, orphan_kind, (id, &name, object)),
    }
}

/// The Pool object of the orphan.
fn pool<'a>(view: &'a View, id: &str) -> std::result::Result<&'a DynamicObject, String> {
    let mut pools = view.pools.iter();
    if let Some(pool) = pools.find(|pool| pool.name() == id) {
        return Ok(pool);
    }
    Err(match view.pools.is_empty() {
        true => format!(
            "the cluster has no Pool objects of {}. With `singleNode: true` no controller writes them: create the objects by hand ({BY_HAND})",
            view.driver
        ),
        false => format!("no pool of {} has the ID {id}", view.driver),
    })
}

/// What names the orphan already: an earlier run has created it, or it is no orphan.
fn owner<'a>(
    arguments: &AdoptArguments,
    view: &'a View,
    orphan_kind: &OrphanKind,
    (id, name): (&str, &str),
) -> std::result::Result<Option<(Owner, &'a DynamicObject)>, String> {
    let kind = orphan_kind.owner.kind;
    let own = view
        .owners
        .iter()
        .filter(|one| orphan_kind.names(one, &view.driver, id));
    let own: Vec<_> = own.collect();
    let [one] = own[..] else {
        if own.is_empty() {
            let other = view.owners.iter().find(|one| one.name() == name);
            return match other {
                None => Ok(None),
                Some(_) => Err(format!(
                    "{kind} {name} exists, and is of something else; give another --name"
                )),
            };
        }
        let names: Vec<_> = own.iter().map(|one| one.name()).collect();
        return Err(format!(
            "several {kind}s name it, of which all but one must be deleted: {}",
            names.join(", ")
        ));
    };
    let place = orphan_kind.place(one);
    let wanted = orphan_kind.wanted(arguments);
    let is_own = one.name() == name && wanted.is_none_or(|wanted| *wanted == place);
    if !is_own {
        return Err(format!(
            "it is no orphan: {kind} {} names it, for {} {place}",
            one.name(),
            orphan_kind.user.kind
        ));
    }
    if one.is_being_deleted() {
        return Err(format!("{kind} {name} names it, and is being deleted"));
    }
    let bound_to = orphan_kind.bound_to(one).to_string();
    Ok(Some((Owner { bound_to }, one)))
}

/// An adoption that an earlier run has begun: the objects that it has created determine the rest.
fn from_existing(
    object: &DynamicObject,
    owner: Owner,
    (id, orphan_kind, pool): (&str, &'static OrphanKind, &DynamicObject),
) -> Adoption {
    Adoption {
        id: id.into(),
        pool: Pool::of(pool).title(),
        what: String::new(),
        orphan_kind,
        place: orphan_kind.place(object),
        is_recorded: false,
        group: String::new(),
        pair: orphan_kind.pair_of(object),
        owner: Some(owner),
        class: None,
    }
}

/// A new adoption.
fn new(
    arguments: &AdoptArguments,
    view: &View,
    orphan_kind: &'static OrphanKind,
    (id, name, pool): (&str, &str, &DynamicObject),
) -> Result<Adoption> {
    check_served(pool).map_err(|why| refused(id, why))?;
    let orphan = get_listed(view, pool, id).map_err(|why| refused(id, why))?;
    check_unreferenced(view, id).map_err(|why| refused(id, why))?;
    let text = |field: &str| orphan[field].as_str().unwrap_or_default();
    if text("kind") != orphan_kind.kind {
        return Err(Failure::usage(match text("kind") {
            "Snapshot" => format!("{id} is a snapshot: give --snapshot NAMESPACE/NAME"),
            _ => format!("{id} is a volume: give --claim NAMESPACE/NAME, and no --snapshot"),
        }));
    }
    let content = match orphan_kind.kind {
        "Snapshot" => Content::Snapshot,
        _ => volume(arguments, pool, orphan).map_err(|why| refused(id, why))?,
    };
    let recorded = orphan["volume"]["claim"]
        .as_str()
        .and_then(|text| text.split_once('/'));
    let recorded = recorded.map(|(namespace, name)| NamespacedName {
        namespace: namespace.into(),
        name: name.into(),
    });
    let wanted = orphan_kind.wanted(arguments);
    let Some(place) = wanted.cloned().or(recorded) else {
        return Err(Failure::usage(format!(
            "give --claim NAMESPACE/NAME: it is not known for which claim {id} was created"
        )));
    };
    let pair = pair(&view.driver, (id, name), &place, &content);
    Ok(Adoption {
        id: id.into(),
        pool: Pool::of(pool).title(),
        what: content_of(&content),
        orphan_kind,
        is_recorded: wanted.is_none(),
        place,
        group: text("group").into(),
        pair,
        owner: None,
        class: None,
    })
}

/// Whether the pool of the orphan is served.
fn check_served(object: &DynamicObject) -> std::result::Result<(), String> {
    let pool = Pool::of(object);
    let title = pool.title();
    if pool.lost {
        return Err(format!(
            "its pool {title} is marked as lost, so what is on it counts as deleted; `kubectl slackwater pool lose {} --undo` removes the mark",
            pool.id
        ));
    }
    let next = object.text("/spec/node");
    if !next.is_empty() && next != pool.node {
        return Err(format!(
            "its pool {title} is being handed over to node {next}"
        ));
    }
    if !matches!(pool.health.as_str(), "Healthy" | "Degraded") {
        let (health, message) = (&pool.health, &pool.message);
        return Err(format!(
            "its pool {title} is not served ({health}: {message})"
        ));
    }
    match pool.home.is_empty() {
        true => Err(format!("the status of its pool {title} has no home")),
        false => Ok(()),
    }
}

/// The orphan in the status of its pool.
fn get_listed<'a>(
    view: &View,
    pool: &'a DynamicObject,
    id: &str,
) -> std::result::Result<&'a Value, String> {
    let title = Pool::of(pool).title();
    if pool.list("/spec/deleteOrphans").iter().any(|one| one == id) {
        return Err(format!(
            "its deletion is requested; `kubectl slackwater orphans --keep {id} --yes` takes the request back"
        ));
    }
    let all = pool.list("/status/orphans/listed");
    let count = pool.number("/status/orphans/count");
    let found = all.iter().find(|one| one["id"] == id).ok_or_else(|| {
        if count > all.len() as i64 {
            return format!(
                "it is not among the {} orphans that the status of pool {title} lists, of {count}; adopt or delete some of these first",
                all.len()
            );
        }
        format!("pool {title} does not list it as an orphan; the controller checks every 5 minutes, and lists what exists and is named by no object")
    })?;
    let Some(checked) = pool.time("/status/orphans/checked") else {
        return Err(format!(
            "it is not known when the orphans of pool {title} were checked"
        ));
    };
    let age = view.now.duration_since(checked).abs();
    match age > MAX_AGE {
        true => Err(format!(
            "the orphans of pool {title} were last checked at {checked}, more than {} minutes ago; see whether a controller runs",
            MAX_AGE.as_mins()
        )),
        false => Ok(found),
    }
}

/// Whether nothing but the status of its pool names the orphan, or is about to.
fn check_unreferenced(view: &View, id: &str) -> std::result::Result<(), String> {
    // While a volume is moved, its PersistentVolume is in an annotation.
    let has = |object: &&DynamicObject| {
        let mut annotations = object.metadata.annotations.iter().flatten();
        annotations.any(|(_, text)| text.contains(id))
    };
    if let Some(pool) = view.pools.iter().find(has) {
        return Err(format!(
            "an annotation of Pool {} names it: its PersistentVolume is being exchanged",
            pool.name()
        ));
    }
    if let Some(owner) = view.owners.iter().find(has) {
        return Err(format!("an annotation of {} names it", owner.name()));
    }
    let of_id =
        |one: &&DynamicObject| one.data.to_string().contains(id) && !Move::of(one).has_ended();
    match view.moves.iter().find(of_id) {
        Some(one) => Err(format!(
            "VolumeMove {}/{} moves it; wait for its end",
            one.namespace(),
            one.name()
        )),
        None => Ok(()),
    }
}

/// What a volume is, as its agent has reported it.
fn volume(
    arguments: &AdoptArguments,
    pool: &DynamicObject,
    orphan: &Value,
) -> std::result::Result<Content, String> {
    let its = &orphan["volume"];
    let Some(size) = its["sizeBytes"].as_i64().filter(|size| *size > 0) else {
        let (node, version) = (pool.text("/status/node"), pool.text("/status/agentVersion"));
        return Err(format!(
            "its size and its file system are not known. The agent of node {node} has not reported them (release {version:?}), or the CustomResourceDefinition is of an older release"
        ));
    };
    let problem = its["problem"].as_str().unwrap_or_default();
    if !problem.is_empty() {
        return Err(problem.into());
    }
    let fs = its["fileSystem"].as_str().unwrap_or_default();
    if !fs.is_empty() && !FILE_SYSTEMS.contains(&fs) {
        return Err(format!(
            "its file system {fs:?} is not known to this program"
        ));
    }
    Ok(Content::Volume {
        size: as_quantity(size),
        fs: fs.into(),
        is_for_readers: its["forReaders"] == true,
        home: pool.text("/status/home").into(),
        class: arguments.class().into(),
    })
}

/// What is still to be created, with the claim or VolumeSnapshot of the name, if it exists.
pub fn missing_objects(
    adoption: &Adoption,
    user: Option<&DynamicObject>,
) -> Result<MissingObjects> {
    let decided = decide(adoption, user);
    decided.map_err(|why| refused(&adoption.id, why))
}

fn decide(
    adoption: &Adoption,
    user: Option<&DynamicObject>,
) -> std::result::Result<MissingObjects, String> {
    let (orphan_kind, place) = (adoption.orphan_kind, &adoption.place);
    let owner_name = adoption.pair.owner["metadata"]["name"]
        .as_str()
        .unwrap_or_default();
    let bound_to = adoption
        .owner
        .as_ref()
        .map_or("", |owner| owner.bound_to.as_str());
    let (owner_kind, user_kind) = (orphan_kind.owner.kind, orphan_kind.user.kind);
    let released = || {
        format!(
            "it is no orphan: {owner_kind} {owner_name} names it, and was bound to another {user_kind} {place}, which is gone"
        )
    };
    let owner = adoption.owner.is_none();
    let Some(user) = user else {
        return match bound_to.is_empty() {
            true => Ok(MissingObjects { owner, user: true }),
            false => Err(released()),
        };
    };
    let title = format!("{user_kind} {place}");
    if user.is_being_deleted() {
        return Err(format!("{title} exists, and is being deleted"));
    }
    let uid = user.uid();
    let is_bound = bound_to == uid && !bound_to.is_empty();
    match user.text(orphan_kind.name_of_owner) {
        name if name == owner_name => {}
        "" => {
            return Err(format!(
                "{title} exists, and does not name {owner_kind} {owner_name}; {}",
                orphan_kind.advice
            ));
        }
        name => {
            return Err(format!(
                "{title} exists, with {owner_kind} {name}; {}",
                orphan_kind.advice
            ));
        }
    }
    if is_bound {
        return Ok(MissingObjects {
            owner: false,
            user: false,
        });
    }
    if !bound_to.is_empty() {
        return Err(released());
    }
    // A controller may have bound it since the owner was read.
    let is_lost = owner || user.text("/status/phase") == "Lost";
    if is_lost && orphan_kind.was_bound(user) {
        return Err(format!(
            "{title} has lost its {owner_kind}, and cannot be bound again: delete it first, which deletes no data"
        ));
    }
    match orphan_kind.difference(&adoption.pair.user, user) {
        Some(field) => Err(format!(
            "{title} exists, and its field {field} does not fit; {}",
            orphan_kind.advice
        )),
        None => Ok(MissingObjects { owner, user: false }),
    }
}

#[cfg(test)]
mod tests;
