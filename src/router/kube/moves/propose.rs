//! Where the volume of a claim could be moved. A pure function of what was read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::StorageClass;

use super::decide::Refusal;
use super::object::MoveTo;
use crate::model::PoolId;
use crate::router::create_volume::pod_placement::fit::{self, peers::Peers};
use crate::router::volume_moves::TargetPool;

/// A node to which a volume could be moved, and the pods on it.
#[derive(Clone, Debug, Default)]
pub(super) struct Room {
    pub(super) node: Option<Node>,
    pub(super) pods: Vec<Pod>,
}

/// What a choice depends on.
pub(super) struct Question<'a> {
    pub(super) to: &'a MoveTo,
    pub(super) source: PoolId,
    pub(super) bytes: u64,
    pub(super) class: &'a StorageClass,
    /// The topology key of the driver.
    pub(super) key: &'a str,
    pub(super) targets: &'a [TargetPool],
    /// By the name of the node. A node that could not be read is missing.
    pub(super) rooms: &'a BTreeMap<String, Room>,
    /// The pods of the claim, and the PersistentVolumes of their other claims.
    pub(super) pods: &'a [Pod],
    pub(super) volumes: &'a [PersistentVolume],
    /// The other pods of the cluster, if one of these has a condition about them.
    pub(super) peers: Option<&'a Peers>,
}

/// Whether a pool is meant by a move.
pub(super) fn is_meant(to: &MoveTo, target: &TargetPool) -> bool {
    let is_node = to.node.as_ref().is_none_or(|node| *node == target.node);
    let is_pool = |pool: &String| *pool == target.name || *pool == target.id.to_string();
    is_node && to.pool.as_ref().is_none_or(is_pool)
}

/// The pool with the most room of those that fit, or for each pool the reason why it does not.
pub(super) fn choose(question: &Question<'_>) -> Result<TargetPool, Refusal> {
    let meant =
        |target: &&TargetPool| is_meant(question.to, target) && target.id != question.source;
    let mut fitting: Vec<&TargetPool> = Vec::new();
    let mut reasons = Vec::new();
    for target in question.targets.iter().filter(meant) {
        match question.fits(target) {
            Ok(()) => fitting.push(target),
            Err(why) => reasons.push(format!(
                "pool {} of node {}: {why}",
                target.name, target.node
            )),
        }
    }
    let best = fitting
        .into_iter()
        .max_by_key(|target| (target.provisionable, std::cmp::Reverse(&target.node)));
    best.cloned().ok_or_else(|| Refusal {
        reason: "NoTarget",
        message: match reasons.is_empty() {
            true => "no pool matches spec.to".into(),
            false => reasons.join("; "),
        },
    })
}

impl Question<'_> {
    fn fits(&self, target: &TargetPool) -> Result<(), String> {
        if let Some(problem) = &target.problem {
            return Err(problem.clone());
        }
        self.check_target(target)?;
        let room = self.rooms.get(&target.node);
        let room = room.ok_or("its node could not be read")?;
        let node = room.node.as_ref().ok_or("its node does not exist")?;
        fit::accepts(node, &target.node)?;
        let labels = node.metadata.labels.clone().unwrap_or_default();
        let mut selector = self.to.node_selector.iter();
        if let Some((key, value)) = selector.find(|(key, value)| labels.get(*key) != Some(*value)) {
            return Err(format!("its node does not have the label {key}={value}"));
        }
        if target.provisionable < self.bytes {
            return Err(format!(
                "{} bytes may still be promised there, but {} are needed",
                target.provisionable, self.bytes
            ));
        }
        if self.to.node.is_some() {
            return Ok(());
        }
        self.pods.iter().try_for_each(|pod| {
            let mut pod = pod.clone();
            if let Some(spec) = &mut pod.spec {
                spec.node_name = None;
            }
            fit::fits(&pod, self.volumes, node, (&room.pods, self.peers))
        })
    }

    /// Whether the class of the claim could have created the volume there.
    fn check_target(&self, target: &TargetPool) -> Result<(), String> {
        let parameters = self.class.parameters.as_ref();
        let named = parameters.and_then(|parameters| parameters.get("pool"));
        let wanted = named.map_or("default", String::as_str);
        let of_node = |other: &&TargetPool| other.node == target.node;
        let is_only = self.targets.iter().filter(of_node).count() == 1;
        if target.name != wanted && !(named.is_none() && is_only) {
            return Err(format!("the class of the claim selects pool {wanted}"));
        }
        let Some(topologies) = self
            .class
            .allowed_topologies
            .as_ref()
            .filter(|all| !all.is_empty())
        else {
            return Ok(());
        };
        let has =
            |expressions: &[k8s_openapi::api::core::v1::TopologySelectorLabelRequirement]| {
                expressions
                    .iter()
                    .all(|one| one.key == self.key && one.values.contains(&target.home))
            };
        let mut terms = topologies.iter();
        match terms.any(|term| term.match_label_expressions.as_deref().is_some_and(has)) {
            true => Ok(()),
            false => Err("the class of the claim does not allow its node".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn target(n: u128, node: &str, provisionable: u64) -> TargetPool {
        TargetPool {
            id: PoolId(uuid::Uuid::from_u128(n)),
            name: "default".into(),
            node: node.into(),
            home: format!("home-of-{node}"),
            provisionable,
            problem: None,
        }
    }

    fn room(name: &str, cordoned: bool) -> Room {
        let node = json!({
            "metadata": { "name": name, "labels": { "disk": name } },
            "spec": { "unschedulable": cordoned },
            "status": {
                "conditions": [{ "type": "Ready", "status": "True" }],
                "allocatable": { "cpu": "2", "pods": "10" },
            },
        });
        Room {
            node: Some(serde_json::from_value(node).unwrap()),
            pods: Vec::new(),
        }
    }

    fn class(extra: serde_json::Value) -> StorageClass {
        let mut class = json!({ "metadata": {}, "provisioner": "csi.slackwater.dev" });
        let fields = extra.as_object().unwrap().clone();
        class.as_object_mut().unwrap().extend(fields);
        serde_json::from_value(class).unwrap()
    }

    fn pod(cpu: &str, anti_affinity: bool) -> Pod {
        let mut pod = json!({ "metadata": { "name": "db", "namespace": "shop" }, "spec": {
            "nodeName": "a",
            "containers": [{ "name": "x", "resources": { "requests": { "cpu": cpu } } }],
        }});
        if anti_affinity {
            pod["spec"]["affinity"] = json!({ "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [{ "topologyKey": "zone" }],
            }});
        }
        serde_json::from_value(pod).unwrap()
    }

    const ALL: [&str; 3] = ["a", "b", "c"];

    struct Case {
        to: MoveTo,
        class: StorageClass,
        targets: Vec<TargetPool>,
        rooms: BTreeMap<String, Room>,
        pods: Vec<Pod>,
        peers: Option<Peers>,
    }

    impl Case {
        fn new() -> Case {
            Case {
                to: MoveTo::default(),
                class: class(json!({})),
                targets: vec![target(1, "a", 90), target(2, "b", 50), target(3, "c", 70)],
                rooms: ALL.map(|name| (name.to_string(), room(name, false))).into(),
                pods: vec![pod("1", false)],
                peers: None,
            }
        }

        fn choose(&self) -> Result<String, String> {
            let chosen = choose(&Question {
                to: &self.to,
                source: PoolId(uuid::Uuid::from_u128(1)),
                bytes: 60,
                class: &self.class,
                key: "key",
                targets: &self.targets,
                rooms: &self.rooms,
                pods: &self.pods,
                volumes: &[],
                peers: self.peers.as_ref(),
            });
            chosen
                .map(|target| target.node)
                .map_err(|refusal| refusal.message)
        }
    }

    #[test]
    fn the_pool_with_the_most_room_that_fits_is_chosen() {
        let mut case = Case::new();
        assert_eq!(
            case.choose().unwrap(),
            "c",
            "not the source, which has more"
        );
        case.targets[1].provisionable = 100;
        assert_eq!(case.choose().unwrap(), "b");
        case.to.node = Some("c".into());
        assert_eq!(case.choose().unwrap(), "c");
        case.to.node = Some("a".into());
        assert_eq!(case.choose().unwrap_err(), "no pool matches spec.to");
    }

    #[test]
    fn each_pool_that_does_not_fit_is_named_with_its_reason() {
        let refused = |change: fn(&mut Case), words: &str| {
            let mut case = Case::new();
            case.targets[1].provisionable = 70;
            assert!(case.choose().is_ok());
            change(&mut case);
            let why = case.choose().unwrap_err();
            for node in ["node b", "node c"] {
                assert!(why.contains(node) && why.contains(words), "{why}");
            }
        };
        refused(
            |case| {
                case.targets
                    .iter_mut()
                    .for_each(|one| one.provisionable = 59);
            },
            "59 bytes",
        );
        let away = |case: &mut Case| {
            let problem = Some("it is down".to_string());
            case.targets
                .iter_mut()
                .for_each(|one| one.problem = problem.clone());
        };
        refused(away, "it is down");
        let cordon = |case: &mut Case| {
            case.rooms = ALL.map(|name| (name.to_string(), room(name, true))).into();
        };
        refused(cordon, "is cordoned");
        refused(|case| case.rooms.clear(), "could not be read");
        let gone = |case: &mut Case| case.rooms.values_mut().for_each(|room| room.node = None);
        refused(gone, "does not exist");
        refused(|case| case.pods = vec![pod("3", false)], "too little cpu");
        refused(|case| case.pods = vec![pod("1", true)], "anti-affinity");
        let other =
            |case: &mut Case| case.class = class(json!({ "parameters": { "pool": "ssd" } }));
        refused(other, "selects pool ssd");
        let fast = |case: &mut Case| {
            case.to.node_selector = [("disk".to_string(), "fast".to_string())].into();
        };
        refused(fast, "disk=fast");
        let topology = |case: &mut Case| {
            case.class = class(json!({ "allowedTopologies": [{ "matchLabelExpressions": [
                { "key": "key", "values": ["home-of-a"] },
            ]}]}));
        };
        refused(topology, "does not allow its node");
    }

    #[test]
    fn with_a_named_node_the_scheduler_is_not_asked() {
        let mut case = Case::new();
        case.pods = vec![pod("3", true)];
        assert!(case.choose().is_err());
        case.to.node = Some("c".into());
        assert_eq!(case.choose().unwrap(), "c");
        case.rooms.insert("c".into(), room("c", true));
        assert!(case.choose().unwrap_err().contains("cordoned"));
    }

    #[test]
    fn a_class_without_a_pool_selects_the_only_one() {
        let mut case = Case::new();
        case.targets[2].name = "ssd".into();
        assert_eq!(case.choose().unwrap(), "c");
        case.targets.push(TargetPool {
            name: "hdd".into(),
            ..target(4, "c", 70)
        });
        assert!(case.choose().unwrap_err().contains("selects pool default"));
        case.class = class(json!({ "parameters": { "pool": "ssd" } }));
        assert_eq!(case.choose().unwrap(), "c");
        case.to.pool = Some("hdd".into());
        assert!(case.choose().is_err());
    }
}
