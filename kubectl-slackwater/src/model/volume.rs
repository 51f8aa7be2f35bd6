//! The claims of the driver with their PersistentVolumes, pools and pods, joined from objects.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};
use serde::Serialize;

use super::pool::{Pool, pools};
use crate::cluster::object::{self, Fields, pool_of};
use crate::cluster::{Cluster, Scope, labeled};
use crate::failure::Result;
use crate::text::quantity;

/// A claim of the driver, or a PersistentVolume without one.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    pub namespace: String,
    /// The claim; empty if the volume has none any more.
    pub claim: String,
    pub status: String,
    /// The PersistentVolume.
    pub volume: String,
    pub handle: String,
    pub size_bytes: i64,
    pub class: String,
    pub mode: String,
    pub pool: String,
    pub pool_name: String,
    pub node: String,
    /// Pods that use it and have not ended.
    pub pods: Vec<String>,
    #[serde(skip)]
    pub created: Option<Timestamp>,
}

/// The driver of a claim, by the annotation of the controller that has provisioned it.
pub fn driver_of(claim: &DynamicObject) -> &str {
    match claim.annotation("volume.kubernetes.io/storage-provisioner") {
        "" => claim.annotation("volume.beta.kubernetes.io/storage-provisioner"),
        driver => driver,
    }
}

/// The claims that a pod uses, and the names of their volumes in it.
pub fn claims_of(pod: &DynamicObject) -> Vec<(String, &str)> {
    let each = pod.list("/spec/volumes").iter();
    let claims = each.filter_map(|volume| {
        let name = volume["name"].as_str()?;
        if volume["ephemeral"].is_object() {
            return Some((format!("{}-{name}", pod.name()), name));
        }
        let claim = volume["persistentVolumeClaim"]["claimName"].as_str()?;
        Some((claim.to_string(), name))
    });
    claims.collect()
}

/// Whether a pod has ended, and uses no volume any more.
pub fn has_ended(pod: &DynamicObject) -> bool {
    matches!(pod.text("/status/phase"), "Succeeded" | "Failed")
}

/// Pods by namespace and claim.
type Users = BTreeMap<(String, String), Vec<(String, String)>>;

fn users(pods: &[DynamicObject]) -> Users {
    let mut users = Users::new();
    for pod in pods.iter().filter(|pod| !has_ended(pod)) {
        for (claim, _) in claims_of(pod) {
            let user = (
                pod.name().to_string(),
                pod.text("/spec/nodeName").to_string(),
            );
            let claim = (pod.namespace().to_string(), claim);
            users.entry(claim).or_default().push(user);
        }
    }
    users
}

/// What the volumes of a scope are joined from.
struct Parts {
    driver: String,
    volumes: Option<Vec<DynamicObject>>,
    pools: Option<BTreeMap<String, Pool>>,
    users: Users,
}

/// The volumes of the driver in a scope, sorted.
pub async fn volumes(
    cluster: &Cluster,
    scope: &Scope,
    selector: Option<&str>,
) -> Result<Vec<Volume>> {
    let params = labeled(selector);
    let claims = cluster.get_all(&object::CLAIM, scope, &params).await?;
    let all = ListParams::default();
    let pods = cluster.find(&object::POD, scope, &all).await?;
    let parts = Parts {
        driver: cluster.driver.clone(),
        volumes: cluster.find(&object::VOLUME, &Scope::All, &all).await?,
        pools: pools(cluster).await?,
        users: users(&pods.unwrap_or_default()),
    };
    let has_orphaned = *scope == Scope::All && selector.is_none();
    Ok(joined(&claims, &parts, has_orphaned))
}

fn joined(claims: &[DynamicObject], parts: &Parts, has_orphaned: bool) -> Vec<Volume> {
    let volumes = parts.volumes.as_deref().unwrap_or_default();
    let is_own = |volume: &&DynamicObject| volume.text("/spec/csi/driver") == parts.driver;
    let own: BTreeMap<&str, &DynamicObject> = volumes
        .iter()
        .filter(is_own)
        .map(|volume| (volume.name(), volume))
        .collect();
    let known: BTreeSet<&str> = volumes.iter().map(Fields::name).collect();
    let mut found = Vec::new();
    let mut claimed = BTreeSet::new();
    for claim in claims {
        let name = claim.text("/spec/volumeName");
        let volume = own.get(name).copied();
        // A claim that is bound belongs to the driver of its volume, whatever its annotation is.
        let is_own = match known.contains(name) {
            true => volume.is_some(),
            false => driver_of(claim) == parts.driver,
        };
        if is_own {
            claimed.insert(name);
            found.push(of_claim(claim, volume, parts));
        }
    }
    if has_orphaned {
        let without = own
            .values()
            .filter(|volume| !claimed.contains(volume.name()));
        found.extend(without.map(|volume| of_volume(volume, parts)));
    }
    found.sort_by(|a, b| {
        let key = |v: &Volume| (v.namespace.clone(), v.claim.clone(), v.volume.clone());
        key(a).cmp(&key(b))
    });
    found
}

fn of_claim(claim: &DynamicObject, volume: Option<&DynamicObject>, parts: &Parts) -> Volume {
    let key = (claim.namespace().to_string(), claim.name().to_string());
    let users = parts.users.get(&key).map_or(&[][..], Vec::as_slice);
    let size = |pointer| quantity(claim.text(pointer));
    let size = size("/status/capacity/storage").or(size("/spec/resources/requests/storage"));
    let mut found = Volume {
        namespace: key.0,
        claim: key.1,
        status: match claim.metadata.deletion_timestamp {
            Some(_) => "Terminating".into(),
            None => claim.text("/status/phase").into(),
        },
        volume: claim.text("/spec/volumeName").into(),
        size_bytes: size.unwrap_or_default(),
        class: claim.text("/spec/storageClassName").into(),
        mode: claim.text("/spec/volumeMode").into(),
        pods: users.iter().map(|(pod, _)| pod.clone()).collect(),
        created: claim.created(),
        ..Volume::default()
    };
    set_location(&mut found, volume, parts);
    if found.node.is_empty() {
        // The pods of the volume run where it is.
        let node = users.iter().find(|(_, node)| !node.is_empty());
        found.node = node.map(|(_, node)| node.clone()).unwrap_or_default();
    }
    found
}

fn of_volume(volume: &DynamicObject, parts: &Parts) -> Volume {
    let mut found = Volume {
        namespace: volume.text("/spec/claimRef/namespace").into(),
        status: volume.text("/status/phase").into(),
        volume: volume.name().into(),
        size_bytes: quantity(volume.text("/spec/capacity/storage")).unwrap_or_default(),
        class: volume.text("/spec/storageClassName").into(),
        mode: volume.text("/spec/volumeMode").into(),
        created: volume.created(),
        ..Volume::default()
    };
    set_location(&mut found, Some(volume), parts);
    found
}

/// Where it is, by its ID.
fn set_location(found: &mut Volume, volume: Option<&DynamicObject>, parts: &Parts) {
    let Some(volume) = volume else { return };
    found.handle = volume.text("/spec/csi/volumeHandle").into();
    found.pool = pool_of(&found.handle).unwrap_or_default().into();
    let pools = parts.pools.as_ref();
    if let Some(pool) = pools.and_then(|pools| pools.get(&found.pool)) {
        found.pool_name.clone_from(&pool.name);
        found.node.clone_from(&pool.node);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const POOL: &str = "11111111-2222-4333-8444-000000000001";

    fn object(value: Value) -> DynamicObject {
        serde_json::from_value(value).unwrap()
    }

    fn claim(n: usize, driver: &str) -> DynamicObject {
        let annotation = "volume.kubernetes.io/storage-provisioner";
        object(
            json!({"metadata": {"name": format!("claim-{n:05}"), "namespace": "shop",
                "annotations": {annotation: driver}},
            "spec": {"volumeName": format!("pv-{n}")}, "status": {"phase": "Bound"}}),
        )
    }

    fn volume(n: usize, driver: &str) -> DynamicObject {
        object(
            json!({"metadata": {"name": format!("pv-{n}")}, "spec": {"csi": {"driver": driver,
            "volumeHandle": format!("{POOL}.00000000-0000-4000-8000-{n:012}")}}}),
        )
    }

    fn parts(volumes: Option<Vec<DynamicObject>>) -> Parts {
        Parts {
            driver: "own".into(),
            volumes,
            pools: Some([(POOL.to_string(), Pool::default())].into()),
            users: Users::new(),
        }
    }

    fn names(claims: &[DynamicObject], parts: &Parts, has_orphaned: bool) -> Vec<String> {
        let found = joined(claims, parts, has_orphaned).into_iter();
        found
            .map(|one| format!("{} {}", one.claim, one.volume))
            .collect()
    }

    #[test]
    fn the_volume_decides_whose_a_claim_is_if_it_can_be_read() {
        let claims = [
            claim(1, "own"),
            claim(2, "own"),
            claim(3, "other"),
            claim(4, "own"),
        ];
        let volumes = vec![
            volume(1, "own"),
            volume(2, "other"),
            volume(3, "own"),
            volume(9, "own"),
        ];
        let readable = parts(Some(volumes));
        // The volume of the fourth claim does not exist.
        let expected = ["claim-00001 pv-1", "claim-00003 pv-3", "claim-00004 pv-4"];
        assert_eq!(names(&claims, &readable, false), expected);
        let all = [" pv-9", expected[0], expected[1], expected[2]];
        assert_eq!(names(&claims, &readable, true), all);
        let expected = ["claim-00001 pv-1", "claim-00002 pv-2", "claim-00004 pv-4"];
        assert_eq!(names(&claims, &parts(None), false), expected);
    }

    #[test]
    fn the_time_of_a_join_grows_with_the_number_of_volumes_and_not_with_its_square() {
        let joined_in = |many: usize, times: usize| {
            let claims: Vec<_> = (0..many).map(|n| claim(n, "own")).collect();
            let parts = parts(Some((0..many).map(|n| volume(n, "own")).collect()));
            let start = std::time::Instant::now();
            for _ in 0..times {
                assert_eq!(joined(&claims, &parts, true).len(), many);
            }
            start.elapsed()
        };
        let (few, many) = (joined_in(1_000, 20), joined_in(20_000, 1));
        // It would be 20 times as long if the list were searched for each claim.
        assert!(many < 10 * few, "{many:?} instead of {few:?}");
    }
}
