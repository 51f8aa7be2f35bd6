//! Plans the adoption of a pool's volumes from the objects of the API server.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::manifest::{Goal, Homes, Manifest};
use super::step::{Step, next};
use super::{Line, VolumeAction};
use crate::model::{PoolId, VolumeId};
use crate::router::kube::reconcile::Next;

/// The users of volumes, as reasons why a volume is in use.
#[derive(Debug, Default)]
pub(super) struct Users {
    by_volume: BTreeMap<String, String>,
    by_claim: BTreeMap<String, String>,
}

impl Users {
    pub(super) fn new(attachments: &[VolumeAttachment], pods: &[Pod]) -> Users {
        let mut users = Users::default();
        for attachment in attachments {
            let Some(volume) = &attachment.spec.source.persistent_volume_name else {
                continue;
            };
            let node = &attachment.spec.node_name;
            let words = format!(
                "it is attached to node {node}: delete the pods that use it, or, if that node is permanently gone, its Node object"
            );
            users.by_volume.insert(volume.clone(), words);
        }
        for pod in pods {
            users.take(pod);
        }
        users
    }

    /// A pod that waits for a node does not use its volumes yet, and a pod that has ended does not any
    /// more.
    fn take(&mut self, pod: &Pod) {
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        let Some(spec) = &pod.spec else { return };
        let (Some(node), false) = (
            &spec.node_name,
            matches!(phase, Some("Succeeded" | "Failed")),
        ) else {
            return;
        };
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        for volume in spec.volumes.iter().flatten() {
            let claim = match (&volume.persistent_volume_claim, &volume.ephemeral) {
                (Some(claim), _) => claim.claim_name.clone(),
                (None, Some(_)) => format!("{name}-{}", volume.name),
                (None, None) => continue,
            };
            let words =
                format!("pod {namespace}/{name} on node {node} uses it: delete that pod first");
            self.by_claim.insert(format!("{namespace}/{claim}"), words);
        }
    }

    fn of(&self, manifest: &Manifest) -> Option<&String> {
        let by_volume = self.by_volume.get(manifest.name());
        by_volume.or_else(|| self.by_claim.get(&manifest.bound()?.claim))
    }
}

/// What is to be done about each volume of a pool, in the order of names, and the number of volumes
/// that are as they should be.
pub(super) fn lines(
    pool: PoolId,
    driver: &str,
    (key, home): (&str, &str),
    live: &[Manifest],
    noted: &BTreeMap<String, Manifest>,
    users: &Users,
) -> (Vec<Line>, usize) {
    let of_pool = |manifest: &Manifest| {
        let handle = manifest.handle(driver)?.parse::<VolumeId>().ok()?;
        (handle.pool == pool).then_some(())
    };
    let there: BTreeMap<&str, &Manifest> = live.iter().map(|one| (one.name(), one)).collect();
    let ours = live.iter().filter(|one| of_pool(one).is_some());
    let names: BTreeSet<&str> = ours
        .map(Manifest::name)
        .chain(noted.keys().map(String::as_str))
        .collect();
    let mut settled = 0;
    let mut lines = Vec::new();
    for name in names {
        let (live, noted) = (there.get(name).copied(), noted.get(name));
        let Some(shown) = live.or(noted) else {
            continue;
        };
        let begun = noted.is_some() || shown.policy_before().is_some();
        let goal = Goal {
            key,
            home,
            handle: None,
        };
        let action = match next(goal, live, noted) {
            Next::Done if !begun => {
                settled += 1;
                continue;
            }
            // The provisioner deletes it, for which it needs no home.
            Next::Step(Step::Retain)
                if shown.phase() == "Released" && shown.policy() == "Delete" =>
            {
                settled += 1;
                continue;
            }
            Next::Refused(why) => VolumeAction::Left(why),
            Next::Step(Step::Retain | Step::Note | Step::Delete) => {
                match (users.of(shown), begun) {
                    (Some(why), _) => VolumeAction::Left(why.clone()),
                    (None, true) => VolumeAction::Finish,
                    (None, false) => VolumeAction::Move,
                }
            }
            Next::Step(Step::Release | Step::Make | Step::Strike | Step::Restore)
            | Next::Wait
            | Next::Done => VolumeAction::Finish,
        };
        lines.push(Line {
            name: name.into(),
            claim: shown.bound().map(|bound| bound.claim),
            from: match shown.homes(key) {
                Homes::One(home) => Some(home),
                Homes::Any | Homes::Else => None,
            },
            action,
        });
    }
    (lines, settled)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::manifest::POLICY;
    use super::super::manifest::tests::{DRIVER, KEY, volume};
    use super::*;

    const POOL: &str = "11111111-2222-4333-8444-555555555555";
    const OTHER: &str = "11111111-2222-4333-8444-666666666666";

    fn of(name: &str, pool: &str, home: &str) -> Manifest {
        let handle = format!("{pool}.aaaaaaaa-2222-4333-8444-555555555555");
        volume(name, &handle, home)
    }

    fn plan(live: &[Manifest], noted: &[Manifest], users: &Users) -> (Vec<String>, usize) {
        let noted = noted.iter().map(|one| (one.name().into(), one.plain()));
        let pool = POOL.parse().unwrap();
        let (lines, settled) = lines(pool, DRIVER, (KEY, "new"), live, &noted.collect(), users);
        let words = lines.into_iter().map(|line| match line.action {
            VolumeAction::Move => format!("{} moves", line.name),
            VolumeAction::Finish => format!("{} finishes", line.name),
            VolumeAction::Left(why) => format!("{} left: {}", line.name, &why[..8.min(why.len())]),
        });
        (words.collect(), settled)
    }

    fn pod(name: &str, node: Option<&str>, phase: &str, volume: Value) -> Pod {
        let pod = json!({
            "metadata": { "name": name, "namespace": "shop" },
            "spec": { "containers": [], "nodeName": node, "volumes": [volume] },
            "status": { "phase": phase },
        });
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn volumes_of_the_pool_move_and_no_others() {
        let mut released = of("released", POOL, "old");
        released.0.data["status"]["phase"] = json!("Released");
        let mut foreign = of("foreign", POOL, "old");
        foreign.0.data["spec"]["csi"]["driver"] = json!("other.example");
        let mut halfway = of("halfway", POOL, "new");
        let annotations = halfway.0.metadata.annotations.get_or_insert_default();
        annotations.insert(POLICY.into(), "Delete".into());
        let mut odd = of("odd", POOL, "old");
        odd.0.data["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"] = json!([]);
        let live = [
            of("there", POOL, "new"),
            of("here", POOL, "old"),
            of("elsewhere", OTHER, "old"),
            released,
            foreign,
            halfway,
            odd,
        ];
        let (lines, settled) = plan(&live, &[of("away", POOL, "old")], &Users::default());
        let expected = [
            "away finishes",
            "halfway finishes",
            "here moves",
            "odd left: its node",
        ];
        assert_eq!(lines, expected);
        assert_eq!(settled, 2, "one is there, one is about to be deleted");
    }

    #[test]
    fn what_is_in_use_stays() {
        let claim = || json!({ "name": "v", "persistentVolumeClaim": { "claimName": "data" } });
        let live = [of("pv", POOL, "old")];
        let with = |pods: &[Pod]| plan(&live, &[], &Users::new(&[], pods)).0.remove(0);
        assert!(with(&[pod("a", Some("node-2"), "Running", claim())]).contains("left: pod shop"));
        assert_eq!(with(&[pod("a", None, "Pending", claim())]), "pv moves");
        assert_eq!(
            with(&[pod("a", Some("node-2"), "Succeeded", claim())]),
            "pv moves"
        );
        let other = json!({ "name": "v", "emptyDir": {} });
        assert_eq!(
            with(&[pod("a", Some("node-2"), "Running", other)]),
            "pv moves"
        );
        let mut generic = live.clone();
        generic[0].0.data["spec"]["claimRef"]["name"] = json!("a-scratch");
        let ephemeral = json!({ "name": "scratch", "ephemeral": {} });
        let pods = [pod("a", Some("node-2"), "Running", ephemeral)];
        let lines = plan(&generic, &[], &Users::new(&[], &pods)).0;
        assert!(lines[0].contains("left: pod shop"), "{lines:?}");
        let attached = json!({ "metadata": {}, "spec": {
            "attacher": DRIVER, "nodeName": "node-2", "source": { "persistentVolumeName": "pv" },
        }});
        let users = Users::new(&[serde_json::from_value(attached).unwrap()], &[]);
        assert!(plan(&live, &[], &users).0[0].contains("left: it is at"));
        // A volume that was deleted already is created again, even if a pod waits for it.
        assert_eq!(plan(&[], &live, &users).0, ["pv finishes"]);
    }
}
