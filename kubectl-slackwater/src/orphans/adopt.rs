//! `orphans --adopt`: a volume or a snapshot that no object names gets objects, so that pods can use its
//! data again.
//!
//! The object that names the orphan is created first, with the name of the claim and without its UID, and
//! the claim afterwards. Before each of both all is read again, so a command that was interrupted is
//! repeated, and two of them do not give one orphan two PersistentVolumes unless they run at the same time
//! under different names. In this case neither creates a claim.

pub mod objects;
pub mod plan;

use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};

use crate::change::{Need, confirm, create, mark, print_lines, require};
use crate::cli::Change;
use crate::cli::adopt::AdoptArguments;
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::{DENIED, Failure, Result};
use crate::model::pools_of;
use plan::{Adoption, MissingObjects, View, get_adoption, missing_objects};

/// Steps, with those that are repeated because another user has created something.
const MAX_STEPS: usize = 6;

/// Runs the command.
pub async fn run(cluster: &Cluster, arguments: &AdoptArguments, change: &Change) -> Result<()> {
    let now = cluster.server_time().await?;
    let (adoption, left) = read_adoption(cluster, arguments, now).await?;
    if !left.owner && !left.user {
        print_lines(&format!(
            "{} has {} already.",
            adoption.id,
            describe_objects(&adoption, "")
        ));
        return Ok(());
    }
    require(cluster, &needs(arguments, &adoption)).await?;
    refuse_class(cluster, arguments, &adoption)?;
    confirm(change, &describe_plan(&adoption, arguments))?;
    // What the API server refuses for the second object is found before the first one exists.
    for line in steps(cluster, &adoption, left, &Change::DRY_RUN).await? {
        if change.dry_run {
            print_lines(&line);
        }
    }
    match change.dry_run {
        true => Ok(()),
        false => {
            complete(cluster, arguments, &adoption, now).await?;
            print_lines(&next_steps(&adoption));
            Ok(())
        }
    }
}

/// Reads what the cluster has, and decides what is still to be created.
pub async fn read_adoption(
    cluster: &Cluster,
    arguments: &AdoptArguments,
    now: Timestamp,
) -> Result<(Adoption, MissingObjects)> {
    let all = ListParams::default();
    let (scope, pools) = (Scope::All, pools_of(&cluster.driver, None));
    let owners = match arguments.new_snapshot {
        Some(_) => &object::SNAPSHOT_CONTENT,
        None => &object::VOLUME,
    };
    let view = View {
        driver: cluster.driver.clone(),
        now,
        pools: cluster.get_all(&object::POOL, &scope, &pools).await?,
        moves: cluster.get_all(&object::MOVE, &scope, &all).await?,
        // Last, because one that is created while this is read must be in the list.
        owners: cluster.get_all(owners, &scope, &all).await?,
    };
    let mut adoption = get_adoption(arguments, &view)?;
    adoption.class = class(cluster, arguments, &adoption).await?;
    adoption.set_mount_options();
    let place = &adoption.place;
    let user = cluster.find_one(adoption.orphan_kind.user, &place.namespace, &place.name);
    let left = missing_objects(&adoption, user.await?.as_ref())?;
    Ok((adoption, left))
}

/// Creates what is left, and reads all again before each object.
pub async fn complete(
    cluster: &Cluster,
    arguments: &AdoptArguments,
    confirmed: &Adoption,
    now: Timestamp,
) -> Result<()> {
    for _ in 0..MAX_STEPS {
        let (adoption, left) = read_adoption(cluster, arguments, now).await?;
        let is_same = adoption.place == confirmed.place
            && (adoption.owner.is_some() || adoption.pair == confirmed.pair);
        if !is_same {
            break;
        }
        let next = MissingObjects {
            owner: left.owner,
            user: left.user && !left.owner,
        };
        if !next.owner && !next.user {
            return Ok(());
        }
        match steps(cluster, &adoption, next, &Change::CONFIRMED).await {
            Ok(lines) => lines.iter().for_each(|line| print_lines(line)),
            // Another command has created it: whether it is the same is decided when all is read again.
            Err(failure) if failure.is_conflict => {}
            Err(failure) => return Err(failure),
        }
    }
    Err(Failure::failed(format!(
        "{} has changed since the plan was made; run the command again",
        confirmed.id
    )))
}

/// Creates objects, and returns a line for each.
async fn steps(
    cluster: &Cluster,
    adoption: &Adoption,
    left: MissingObjects,
    change: &Change,
) -> Result<Vec<String>> {
    let (orphan_kind, pair) = (adoption.orphan_kind, &adoption.pair);
    let all = [
        (left.owner, orphan_kind.owner, &pair.owner),
        (left.user, orphan_kind.user, &pair.user),
    ];
    let mut lines = Vec::new();
    for (_, kind, object) in all.into_iter().filter(|(is_left, _, _)| *is_left) {
        let namespace = &adoption.place.namespace;
        let made = create(cluster, change, kind, namespace, object.clone()).await?;
        let place = match kind.is_namespaced {
            true => format!(" in namespace {namespace}"),
            false => String::new(),
        };
        let (kind, mark) = (kind.kind.to_lowercase(), mark(change));
        lines.push(format!("{kind}/{} created{place}{mark}", made.name()));
    }
    Ok(lines)
}

/// The StorageClass of a new volume. `None` also if the user may not read it, which [`needs`] requires then.
async fn class(
    cluster: &Cluster,
    arguments: &AdoptArguments,
    adoption: &Adoption,
) -> Result<Option<DynamicObject>> {
    if !has_class(arguments, adoption) {
        return Ok(None);
    }
    let found = cluster.find_one(&object::STORAGE_CLASS, "", arguments.class());
    match found.await {
        Err(failure) if failure.code == DENIED => Ok(None),
        found => found,
    }
}

/// Whether a PersistentVolume with a class is to be created.
fn has_class(arguments: &AdoptArguments, adoption: &Adoption) -> bool {
    adoption.owner.is_none() && arguments.new_snapshot.is_none() && !arguments.class().is_empty()
}

/// The class has to exist: without it, a claim cannot be expanded.
fn refuse_class(cluster: &Cluster, arguments: &AdoptArguments, adoption: &Adoption) -> Result<()> {
    if !has_class(arguments, adoption) {
        return Ok(());
    }
    let why = match &adoption.class {
        Some(class) if class.text("/provisioner") == cluster.driver => return Ok(()),
        Some(class) => format!("is of {}", class.text("/provisioner")),
        None => "does not exist".into(),
    };
    Err(Failure::failed(format!(
        "StorageClass {} {why}: give one of {} with --class, or --class '' for none",
        arguments.class(),
        cluster.driver
    )))
}

fn needs<'a>(arguments: &AdoptArguments, adoption: &'a Adoption) -> Vec<Need<'a>> {
    let need = |verb, kind: &'static Kind, namespace| Need {
        verb,
        kind,
        namespace,
        name: "",
    };
    let (orphan_kind, namespace) = (adoption.orphan_kind, adoption.place.namespace.as_str());
    let mut needs = vec![
        need("list", &object::POOL, ""),
        need("list", &object::MOVE, ""),
        need("list", orphan_kind.owner, ""),
        need("get", orphan_kind.user, namespace),
        need("create", orphan_kind.user, namespace),
    ];
    if adoption.owner.is_none() {
        needs.push(need("create", orphan_kind.owner, ""));
        if has_class(arguments, adoption) {
            needs.push(need("get", &object::STORAGE_CLASS, ""));
        }
    }
    needs
}

/// The objects of the orphan, for people.
fn describe_objects(adoption: &Adoption, policy: &str) -> String {
    let owner = adoption.pair.owner["metadata"]["name"].as_str();
    format!(
        "{} {}{policy} and {} {}",
        adoption.orphan_kind.owner.kind,
        owner.unwrap_or_default(),
        adoption.orphan_kind.user.kind,
        adoption.place,
    )
}

/// The plan, as the user confirms it.
fn describe_plan(adoption: &Adoption, arguments: &AdoptArguments) -> String {
    let mut plan = format!(
        "The {} {}{} of pool {} gets {}.",
        adoption.orphan_kind.what,
        adoption.id,
        adoption.what,
        adoption.pool,
        describe_objects(adoption, " (policy Retain)")
    );
    if adoption.owner.is_some() {
        plan += " An earlier run has begun this.";
    }
    if adoption.is_recorded {
        plan += "\nBy its record it was created for this claim; --claim gives another one.";
    }
    let is_new = adoption.owner.is_none() && arguments.new_snapshot.is_none();
    if is_new && arguments.class().is_empty() {
        plan += "\nWithout a StorageClass it cannot be expanded.";
    }
    if !adoption.group.is_empty() {
        plan += &format!("\nIt is a member of group snapshot {}.", adoption.group);
    }
    plan
}

/// What the user can do next.
fn next_steps(adoption: &Adoption) -> String {
    let (orphan_kind, place) = (adoption.orphan_kind, &adoption.place);
    let name = adoption.pair.owner["metadata"]["name"]
        .as_str()
        .unwrap_or_default();
    let owner = orphan_kind.owner.kind.to_lowercase();
    let use_it = match orphan_kind.what {
        "snapshot" => format!("VolumeSnapshot {place} can be restored as soon as it is ready."),
        _ => format!("Pods can use claim {place} as soon as it is bound."),
    };
    let delete_it = match adoption.group.as_str() {
        "" => format!(
            "To have its data deleted with it: kubectl patch {owner} {name} --type=merge --patch '{{\"spec\":{{\"{}\":\"Delete\"}}}}'",
            orphan_kind.policy
        ),
        _ => format!(
            "When both objects are deleted, `kubectl slackwater orphans --now --delete {}` deletes the snapshot.",
            adoption.id
        ),
    };
    format!("{use_it} Its data stay when it is deleted.\n{delete_it}")
}
