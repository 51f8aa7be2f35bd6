//! The members of a group snapshot.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::DynamicObject;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result};
use crate::model::snapshot::{self, Group, Snapshot};
use crate::text::after_colon;

/// Members of a group that is restored, at most: as many as an archive has.
const MAX_MEMBERS: usize = 1024;
/// Names in an error, at most.
const MAX_NAMES: usize = 5;

/// As a message names it.
pub fn title(group: &Group) -> String {
    format!("VolumeGroupSnapshot {}/{}", group.namespace, group.name)
}

/// All members of a group, sorted by the name of their claim. Its content lists the snapshots; a
/// VolumeSnapshot is one of them if it is bound to a content with this handle. What the VolumeSnapshot
/// records about its group only decides between two of one handle. A group of which one is missing is
/// refused: the application would start with volumes of different times, or with an empty one.
pub async fn members(
    cluster: &Cluster,
    group: &Group,
    mut snapshots: Vec<Snapshot>,
) -> Result<Vec<Snapshot>> {
    let refuse = |why: String| Failure::failed(format!("{} {why}", title(group)));
    if group.is_being_deleted {
        return Err(refuse("is being deleted".into()));
    }
    if !group.ready {
        let why = after_colon(&group.error);
        return Err(refuse(format!("is not ready{why}")));
    }
    let content = cluster.find_one(&object::GROUP_CONTENT, "", &group.content);
    let Some(content) = content.await? else {
        return Err(refuse(
            "has no VolumeGroupSnapshotContent, so whether it is complete is not known".into(),
        ));
    };
    let handles = handles(group, &content).map_err(refuse)?;
    read_handles(cluster, group, &mut snapshots).await?;
    let mut members = match_members(group, &handles, snapshots).map_err(refuse)?;
    members.sort_by(|a, b| (a.base(), &a.name).cmp(&(b.base(), &b.name)));
    let mut pairs = members.windows(2);
    match pairs.find(|pair| pair[0].base() == pair[1].base()) {
        None => Ok(members),
        Some(pair) => Err(refuse(format!(
            "has two members for the claim {}: {} and {}",
            pair[0].base(),
            pair[0].name,
            pair[1].name
        ))),
    }
}

/// The handles of all snapshots of the group, as its content has them in any version of the API.
fn handles(
    group: &Group,
    content: &DynamicObject,
) -> std::result::Result<BTreeSet<String>, String> {
    let name = content.name();
    if !snapshot::is_bound(
        content,
        "/spec/volumeGroupSnapshotRef",
        (&group.namespace, &group.name, &group.uid),
    ) {
        return Err(format!(
            "names VolumeGroupSnapshotContent {name}, which is bound to another VolumeGroupSnapshot"
        ));
    }
    listed_handles(content)
}

/// The handles of all snapshots that a VolumeGroupSnapshotContent lists.
pub fn listed_handles(content: &DynamicObject) -> std::result::Result<BTreeSet<String>, String> {
    let name = content.name();
    let lists = [
        "/status/volumeSnapshotInfoList",
        "/status/volumeSnapshotHandlePairList",
    ];
    let listed = lists.iter().flat_map(|list| content.list(list));
    let listed = listed.map(|one| &one["snapshotHandle"]);
    let imported = content.list("/spec/source/groupSnapshotHandles/volumeSnapshotHandles");
    let each = listed.chain(imported).filter_map(Value::as_str);
    let handles: BTreeSet<_> = each.map(str::to_string).collect();
    let volumes = content.list("/spec/source/volumeHandles").len();
    if handles.is_empty() || handles.len() < volumes {
        return Err(format!(
            "has {volumes} volumes, and VolumeGroupSnapshotContent {name} lists {} snapshots, so whether it is complete is not known",
            handles.len()
        ));
    }
    match handles.len() <= MAX_MEMBERS {
        true => Ok(handles),
        false => Err(format!(
            "has {} members; at most {MAX_MEMBERS} are restored together",
            handles.len()
        )),
    }
}

/// Reads the handles of VolumeSnapshots that name the group, where contents could not be listed.
async fn read_handles(cluster: &Cluster, group: &Group, snapshots: &mut [Snapshot]) -> Result<()> {
    let without = |one: &&mut Snapshot| one.handle.is_empty() && names_group(one, group);
    let without: Vec<_> = snapshots.iter_mut().filter(without).collect();
    if without.len() > MAX_MEMBERS {
        return Err(Failure::failed(format!(
            "{} VolumeSnapshots name {}; at most {MAX_MEMBERS} are restored together",
            without.len(),
            title(group)
        )));
    }
    for one in without {
        let content = cluster.find_one(&object::SNAPSHOT_CONTENT, "", &one.content);
        let content = content.await?;
        let own = (one.namespace.as_str(), one.name.as_str(), one.uid.as_str());
        let is_its = |it: &DynamicObject| snapshot::is_bound(it, "/spec/volumeSnapshotRef", own);
        let content = content.filter(is_its);
        let handle = content
            .as_ref()
            .map_or("", |it| it.text("/status/snapshotHandle"));
        one.handle = handle.into();
    }
    Ok(())
}

/// Whether a VolumeSnapshot names the group as its own. The owner is absent where a backup program has
/// removed it.
fn names_group(one: &Snapshot, group: &Group) -> bool {
    one.group == group.name && (one.group_uid.is_empty() || one.group_uid == group.uid)
}

/// The VolumeSnapshot of each handle.
fn match_members(
    group: &Group,
    handles: &BTreeSet<String>,
    snapshots: Vec<Snapshot>,
) -> std::result::Result<Vec<Snapshot>, String> {
    let each = handles.iter().map(|handle| (handle.clone(), Vec::new()));
    let mut by_handle: BTreeMap<String, Vec<Snapshot>> = each.collect();
    let mut others = Vec::new();
    for one in snapshots {
        match by_handle.get_mut(&one.handle) {
            Some(found) => found.push(one),
            None if names_group(&one, group) => others.push(one.name),
            None => {}
        }
    }
    let missing = by_handle.iter().filter(|(_, found)| found.is_empty());
    let missing: Vec<_> = missing.map(|(handle, _)| handle.clone()).collect();
    let not_its = match others.is_empty() {
        true => String::new(),
        false => format!(
            "these VolumeSnapshots name it, and their contents have none of its handles: {}",
            first_names(&others)
        ),
    };
    let advice = "single members can be restored by the names of their VolumeSnapshots";
    if !missing.is_empty() {
        let more = match not_its.as_str() {
            "" => String::new(),
            not_its => format!("; {not_its}"),
        };
        return Err(format!(
            "is incomplete: namespace {} has no VolumeSnapshot for {} of its {} snapshots: {}{more}; {advice}",
            group.namespace,
            missing.len(),
            handles.len(),
            first_names(&missing)
        ));
    }
    if !not_its.is_empty() {
        return Err(format!("is not clear: {not_its}; {advice}"));
    }
    let mut members = Vec::new();
    for (handle, mut found) in by_handle {
        if found.len() > 1 && found.iter().filter(|one| names_group(one, group)).count() == 1 {
            found.retain(|one| names_group(one, group));
        }
        if found.len() > 1 {
            let all: Vec<_> = found.into_iter().map(|one| one.name).collect();
            return Err(format!(
                "has several VolumeSnapshots for its snapshot {handle}: {}; {advice}",
                first_names(&all)
            ));
        }
        members.extend(found);
    }
    Ok(members)
}

/// Some of many names.
pub fn first_names(names: &[String]) -> String {
    let shown = names[..names.len().min(MAX_NAMES)].join(", ");
    match names.len().checked_sub(MAX_NAMES) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group() -> Group {
        Group {
            namespace: "shop".into(),
            name: "nightly".into(),
            uid: "group".into(),
            ..Group::default()
        }
    }

    fn snapshot(name: &str, handle: &str, group: &str) -> Snapshot {
        Snapshot {
            name: name.into(),
            handle: handle.into(),
            group: group.into(),
            ..Snapshot::default()
        }
    }

    fn found(snapshots: &[Snapshot]) -> std::result::Result<Vec<String>, String> {
        let handles = ["a", "b"].map(String::from).into();
        let members = match_members(&group(), &handles, snapshots.to_vec())?;
        Ok(members.into_iter().map(|one| one.name).collect())
    }

    #[test]
    fn a_member_is_known_by_its_handle_alone() {
        let a = snapshot("one", "a", "nightly");
        let names = |more: &[Snapshot]| found(&[std::slice::from_ref(&a), more].concat());
        let both = Ok(vec!["one".to_string(), "two".into()]);
        assert_eq!(names(&[snapshot("two", "b", "nightly")]), both);
        // A backup program has taken it out of its group.
        assert_eq!(names(&[snapshot("two", "b", "")]), both);
        // As many as there should be, and one of another snapshot.
        let why = names(&[snapshot("two", "c", "nightly")]).unwrap_err();
        assert!(why.contains("for 1 of its 2 snapshots"), "{why}");
        assert!(why.contains(": b; these VolumeSnapshots name it"), "{why}");
        assert!(why.contains("none of its handles: two"), "{why}");
        let b = snapshot("two", "b", "nightly");
        let why = names(&[b.clone(), snapshot("three", "", "nightly")]).unwrap_err();
        assert!(why.contains("none of its handles: three"), "{why}");
        // One of the same snapshot that was imported is no second member.
        assert_eq!(names(&[b.clone(), snapshot("again", "b", "")]), both);
        let why = names(&[b, snapshot("again", "b", "nightly")]).unwrap_err();
        assert!(why.contains("for its snapshot b: two, again"), "{why}");
    }

    #[test]
    fn a_snapshot_of_an_earlier_group_of_the_name_is_no_member() {
        let earlier = Snapshot {
            group_uid: "another".into(),
            ..snapshot("three", "c", "nightly")
        };
        let both = [snapshot("one", "a", ""), snapshot("two", "b", ""), earlier];
        assert!(found(&both).is_ok());
    }

    #[test]
    fn a_content_that_does_not_list_all_snapshots_is_refused() {
        let of = |name: &str, volumes: usize, status: Value, imported: &[&str]| {
            let content = json!({"metadata": {"name": "content"}, "spec": {
                "volumeGroupSnapshotRef": {"namespace": "shop", "name": name},
                "source": {"volumeHandles": vec!["v"; volumes],
                    "groupSnapshotHandles": {"volumeSnapshotHandles": imported}}}, "status": status});
            let content = serde_json::from_value(content).unwrap();
            handles(&group(), &content).map(|handles| handles.len())
        };
        let pair = |handle: &str| json!({"snapshotHandle": handle, "volumeHandle": "v"});
        let info = json!({"volumeSnapshotInfoList": [pair("a"), pair("b")]});
        let pairs = json!({"volumeSnapshotHandlePairList": [pair("a"), pair("b")]});
        for status in [info.clone(), pairs] {
            assert_eq!(of("nightly", 2, status.clone(), &[]), Ok(2));
            assert!(of("nightly", 3, status, &[]).is_err());
        }
        assert_eq!(of("nightly", 0, json!({}), &["a", "b", "c"]), Ok(3));
        assert!(of("nightly", 0, json!({}), &[]).is_err());
        let why = of("other", 2, info, &[]).unwrap_err();
        assert!(why.contains("another VolumeGroupSnapshot"), "{why}");
        let many: Vec<_> = (0..=MAX_MEMBERS).map(|n| n.to_string()).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        assert!(of("nightly", 0, json!({}), &many).is_err());
        assert!(of("nightly", 0, json!({}), &many[1..]).is_ok());
    }

    #[test]
    fn an_error_names_a_few_of_many() {
        let names = |many: usize| first_names(&vec!["x".to_string(); many]);
        assert_eq!(names(5), "x, x, x, x, x");
        assert_eq!(names(7), "x, x, x, x, x and 2 more");
    }
}
