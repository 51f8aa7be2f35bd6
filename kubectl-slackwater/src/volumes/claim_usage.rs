//! `who CLAIM`: the node of its volume, and the pods that use it.

use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::Format;
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::listing::print;
use crate::listing::{self, Column, column, table, wide_column};
use crate::model::snapshot::{self, Snapshot};
use crate::model::{self, Move, Volume};
use crate::text::{age, size};

/// A container that has the volume.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct User {
    pod: String,
    phase: String,
    node: String,
    container: String,
    /// The directory, or the device of a raw block volume.
    path: String,
    read_only: bool,
}

/// What is printed about one claim.
struct Found {
    volume: Volume,
    /// `None` if the user may not list pods.
    users: Option<Vec<User>>,
    snapshot: Option<Snapshot>,
    moves: Vec<Move>,
}

const USERS: [Column; 6] = [
    column("POD"),
    column("PHASE"),
    column("NODE"),
    column("CONTAINER"),
    column("PATH"),
    wide_column("READ ONLY"),
];

/// Prints where the volume of a claim is, and which pods use it.
pub async fn run(cluster: &Cluster, claim: &str, format: Format) -> Result<()> {
    let found = get_volume(cluster, claim).await?;
    let notes = cluster.take_notes();
    let text = match format {
        Format::Table | Format::Wide => render(&found, format == Format::Wide),
        Format::Name => found
            .users
            .iter()
            .flatten()
            .map(|user| format!("pod/{}\n", user.pod))
            .collect(),
        Format::Json | Format::Yaml => {
            let Found {
                volume,
                users,
                snapshot,
                moves,
            } = &found;
            let all = json!({ "volume": volume, "users": users, "lastSnapshot": snapshot,
                "moves": moves, "notes": notes });
            listing::serialize(format, &all)?
        }
    };
    print(&text, &listing::note_lines(&notes));
    Ok(())
}

async fn get_volume(cluster: &Cluster, claim: &str) -> Result<Found> {
    let scope = Scope::Namespace(cluster.namespace.clone());
    cluster
        .get(&object::CLAIM, &cluster.namespace, claim)
        .await?;
    let mut volumes = model::volumes(cluster, &scope, None).await?;
    volumes.retain(|volume| volume.claim == claim);
    let Some(volume) = volumes.pop() else {
        return Err(Failure::failed(format!(
            "claim {claim} of namespace {} is not of the driver {}",
            cluster.namespace, cluster.driver
        )));
    };
    let all = ListParams::default();
    let pods = cluster.find(&object::POD, &scope, &all).await?;
    let users = pods.map(|pods| pods.iter().flat_map(|pod| users(pod, claim)).collect());
    let mut moves = model::moves(cluster, &scope).await?;
    moves.retain(|one| one.claim == claim && !one.has_ended());
    let snapshots = snapshot::snapshots(cluster, &scope, None).await?;
    Ok(Found {
        volume,
        users,
        // They are sorted, the newest first.
        snapshot: snapshots
            .into_iter()
            .find(|one| one.claim == claim && one.ready),
        moves,
    })
}

/// Containers of a pod that have the volume of a claim.
fn users(pod: &DynamicObject, claim: &str) -> Vec<User> {
    let claims = model::claims_of(pod);
    let Some((_, volume)) = claims.iter().find(|(name, _)| name == claim) else {
        return Vec::new();
    };
    let user = |container: &Value, path: &Value, read_only: bool| User {
        pod: pod.name().into(),
        phase: match pod.metadata.deletion_timestamp {
            Some(_) => "Terminating".into(),
            None => pod.text("/status/phase").into(),
        },
        node: pod.text("/spec/nodeName").into(),
        container: container["name"].as_str().unwrap_or_default().into(),
        path: path.as_str().unwrap_or_default().into(),
        read_only,
    };
    let mut found = Vec::new();
    for list in ["/spec/initContainers", "/spec/containers"] {
        for container in pod.list(list) {
            let each = |key: &str| container[key].as_array().cloned().unwrap_or_default();
            for mount in each("volumeMounts")
                .iter()
                .filter(|it| it["name"] == *volume)
            {
                let read_only = mount["readOnly"].as_bool().unwrap_or_default();
                found.push(user(container, &mount["mountPath"], read_only));
            }
            for device in each("volumeDevices")
                .iter()
                .filter(|it| it["name"] == *volume)
            {
                found.push(user(container, &device["devicePath"], false));
            }
        }
    }
    found
}

fn render(found: &Found, is_wide: bool) -> String {
    let Found {
        volume, snapshot, ..
    } = found;
    let last = snapshot.as_ref().map(|one| {
        let level = match one.cut.level.as_str() {
            "" => "unknown",
            level => level,
        };
        let age = match age(one.cut.cut_at, Timestamp::now()).as_str() {
            "" => String::new(),
            age => format!(", {age} ago"),
        };
        format!("{} (level {level}{age})", one.name)
    });
    let mut facts = vec![
        [
            "Claim:".to_string(),
            format!("{}/{}", volume.namespace, volume.claim),
        ],
        ["Status:".into(), volume.status.clone()],
        ["Size:".into(), size(volume.size_bytes)],
        ["Node:".into(), volume.node.clone()],
        ["Pool:".into(), volume.pool_name.clone()],
        ["Volume:".into(), volume.volume.clone()],
        ["ID:".into(), volume.handle.clone()],
        ["Last snapshot:".into(), last.unwrap_or_default()],
    ];
    for one in &found.moves {
        let to = match one.to.as_str() {
            "" => "a node that is not chosen yet",
            to => to,
        };
        facts.push([
            "Move:".into(),
            format!("{} to {to}, {}", one.name, one.phase),
        ]);
    }
    let rows: Vec<&[String]> = facts.iter().map(|fact| &fact[..]).collect();
    let mut text = table(&[column(""), column("")], &rows, false, false);
    text.push('\n');
    let Some(users) = &found.users else {
        return text + "Which pods use it is not shown.\n";
    };
    if users.is_empty() {
        return text + "No pod uses it.\n";
    }
    let users: Vec<[String; 6]> = users
        .iter()
        .map(|user| {
            [
                user.pod.clone(),
                user.phase.clone(),
                user.node.clone(),
                user.container.clone(),
                user.path.clone(),
                user.read_only.to_string(),
            ]
        })
        .collect();
    let rows: Vec<&[String]> = users.iter().map(|user| &user[..]).collect();
    text + &table(&USERS, &rows, is_wide, true)
}
