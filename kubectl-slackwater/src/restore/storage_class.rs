//! The StorageClasses of copies: the default one, and when and where they create volumes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use kube::api::{DynamicObject, ListParams};

use super::plan::{Copy, State};
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{DENIED, Failure, Result};

/// The annotations of a default class, either of which Kubernetes reads.
const DEFAULT: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];

/// A class of this driver.
#[derive(Clone, Copy, Debug)]
pub struct Class {
    /// Its volumes are created at once, without a pod.
    pub is_immediate: bool,
    /// A restore is created on the node of its snapshot, wherever its pod runs.
    pub is_at_source: bool,
}

/// The classes that the user may read, by their names.
pub type Classes = BTreeMap<String, Class>;

/// The class that a claim without one gets: the newest default, and the first by name of those of the
/// same second, as the API server chooses it.
fn default(classes: &[DynamicObject]) -> Option<&DynamicObject> {
    let is_default = |class: &&DynamicObject| {
        let mut each = DEFAULT.iter();
        each.any(|name| class.annotation(name) == "true")
    };
    let marked = classes.iter().filter(is_default);
    marked.min_by_key(|class| (Reverse(class.created()), class.name()))
}

/// Gives copies for which no class is known the default one. Refuses them if there is none, or if it is
/// another driver's.
pub async fn resolve(cluster: &Cluster, copies: &mut [Copy]) -> Result<()> {
    let is_new = |copy: &Copy| matches!(copy.state, State::Planned | State::Blocked);
    let without = copies.iter_mut();
    let mut without: Vec<_> = without
        .filter(|copy| copy.class.is_empty() && is_new(copy))
        .collect();
    let Some(first) = without.first().map(|copy| copy.claim.clone()) else {
        return Ok(());
    };
    let all = ListParams::default();
    let classes = cluster.find(&object::STORAGE_CLASS, &Scope::All, &all);
    let Some(classes) = classes.await? else {
        cluster.note(format!(
            "the class of claim {first} is the default one, which is not known: you may not list storageclasses"
        ));
        return Ok(());
    };
    let own = classes
        .iter()
        .filter(|class| class.text("/provisioner") == cluster.driver);
    let own: Vec<_> = own.map(Fields::name).collect();
    let advice = match own.is_empty() {
        true => format!("create a StorageClass of {}", cluster.driver),
        false => format!("give --storage-class ({})", own.join(", ")),
    };
    let none = format!("no StorageClass is known for claim {first}");
    let Some(default) = default(&classes) else {
        return Err(Failure::usage(format!(
            "{none}, and no class is the default one: {advice}"
        )));
    };
    let (name, driver) = (default.name(), default.text("/provisioner"));
    if driver != cluster.driver {
        return Err(Failure::usage(format!(
            "{none}, and the default class {name} is of {driver}: {advice}"
        )));
    }
    for copy in &mut without {
        copy.class = name.into();
    }
    Ok(())
}

/// Reads the classes of copies. Refuses one that does not exist, or that is another driver's.
pub async fn read(cluster: &Cluster, copies: &[Copy]) -> Result<Classes> {
    let mut found = Classes::new();
    let names: BTreeSet<&str> = copies.iter().map(|copy| copy.class.as_str()).collect();
    for name in names.into_iter().filter(|name| !name.is_empty()) {
        match cluster.find_one(&object::STORAGE_CLASS, "", name).await {
            Ok(None) => {
                return Err(Failure::failed(format!(
                    "StorageClass {name} does not exist: give another one with --storage-class"
                )));
            }
            Ok(Some(class)) => {
                let driver = class.text("/provisioner");
                if driver != cluster.driver {
                    return Err(Failure::failed(format!(
                        "StorageClass {name} is of {driver}, and snapshots of {} can be restored by no other driver: give another one with --storage-class",
                        cluster.driver
                    )));
                }
                let class = Class {
                    is_immediate: class.text("/volumeBindingMode") != "WaitForFirstConsumer",
                    is_at_source: class.text("/parameters/restore") == "source",
                };
                found.insert(name.to_string(), class);
            }
            Err(failure) if failure.code == DENIED => cluster.note(format!(
                "when class {name} creates volumes is not known: you may not read storageclasses"
            )),
            Err(failure) => return Err(failure),
        }
    }
    Ok(found)
}

/// Whether the volume of a copy is created at once, without a pod.
pub fn is_immediate(classes: &Classes, copy: &Copy) -> bool {
    let class = classes.get(&copy.class);
    class.is_some_and(|class| class.is_immediate)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_newest_default_class_is_the_default_one() {
        let class = |name: &str, key: &str, value: &str, at: &str| -> DynamicObject {
            let class = json!({"metadata": {"name": name, "annotations": {key: value},
                "creationTimestamp": format!("2026-01-01T00:00:{at}Z")}});
            serde_json::from_value(class).unwrap()
        };
        let name = |classes: &[DynamicObject]| default(classes).map(|it| it.name().to_string());
        let [current, beta] = DEFAULT;
        assert_eq!(name(&[]), None);
        let others = [
            class("a", current, "false", "09"),
            class("b", "example.org/is-default-class", "true", "09"),
        ];
        assert_eq!(name(&others), None);
        let all = [
            class("old", current, "true", "01"),
            class("new-b", beta, "true", "02"),
            class("new-a", current, "true", "02"),
            class("newest", current, "no", "03"),
        ];
        assert_eq!(name(&all).as_deref(), Some("new-a"));
        assert_eq!(name(&all[..2]).as_deref(), Some("new-b"));
        assert_eq!(name(&all[..1]).as_deref(), Some("old"));
    }
}
