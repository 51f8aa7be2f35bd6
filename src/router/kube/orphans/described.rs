//! What the agent of a pool reports of its orphans, so far as it can be true. The status of the pool has it,
//! and a person who adopts an orphan gets a PersistentVolume with it.

use std::collections::BTreeMap;

use super::deletion::kind;
use super::{DescribedVolume, OrphanKind};
use crate::model::{FsType, is_claim};
use crate::router::kube::pools::object::{OrphanVolume, PoolOrphan};

/// Characters of a problem that are kept.
const MAX_PROBLEM: usize = 300;

/// Adds to the volumes in the list what their agent reports. What it reports of others is ignored.
pub(super) fn described(listed: &mut [PoolOrphan], answer: Vec<DescribedVolume>) {
    let each = answer.into_iter();
    let mut answer: BTreeMap<_, _> = each.map(|one| (one.volume_id.clone(), one)).collect();
    for orphan in listed.iter_mut() {
        if orphan.kind == kind(OrphanKind::Volume) {
            orphan.volume = answer.remove(&orphan.id).and_then(checked);
        }
    }
}

/// `None` if it cannot be true.
fn checked(volume: DescribedVolume) -> Option<OrphanVolume> {
    let file_system = match volume.file_system.as_str() {
        "" => None,
        name => Some(name.parse::<FsType>().ok()?.name().to_string()),
    };
    let size_bytes = i64::try_from(volume.size_bytes).ok();
    Some(OrphanVolume {
        size_bytes: size_bytes.filter(|size| *size > 0)?,
        file_system,
        for_readers: volume.for_readers,
        claim: Some(volume.claim).filter(|claim| is_claim(claim)),
        problem: volume.problem.chars().take(MAX_PROBLEM).collect(),
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn orphan(kind: &str, id: &str) -> PoolOrphan {
        PoolOrphan {
            id: id.into(),
            kind: kind.into(),
            group: None,
            since: Time(Timestamp::UNIX_EPOCH),
            delete_at: None,
            message: String::new(),
            volume: None,
        }
    }

    fn report(id: &str) -> DescribedVolume {
        DescribedVolume {
            volume_id: id.into(),
            size_bytes: 1 << 30,
            file_system: "xfs".into(),
            for_readers: true,
            claim: "shop/data-pg-0.copy".into(),
            problem: String::new(),
        }
    }

    #[test]
    fn only_volumes_in_the_list_are_described() {
        let mut listed = [
            orphan("Volume", "a"),
            orphan("Snapshot", "b"),
            orphan("Volume", "c"),
        ];
        described(&mut listed, vec![report("x"), report("b"), report("a")]);
        let volume = OrphanVolume {
            size_bytes: 1 << 30,
            file_system: Some("xfs".into()),
            for_readers: true,
            claim: Some("shop/data-pg-0.copy".into()),
            problem: String::new(),
        };
        assert_eq!(listed.map(|one| one.volume), [Some(volume), None, None]);
    }

    #[test]
    fn what_cannot_be_true_is_not_believed() {
        let with = |change: fn(&mut DescribedVolume)| {
            let mut report = report("a");
            change(&mut report);
            checked(report)
        };
        assert_eq!(with(|one| one.size_bytes = 0), None);
        assert_eq!(with(|one| one.size_bytes = 1 << 63), None);
        assert_eq!(with(|one| one.file_system = "nfs".into()), None);
        let raw = with(|one| one.file_system = String::new()).unwrap();
        assert_eq!(raw.file_system, None);
        let long = with(|one| one.problem = "\u{e4}".repeat(9000)).unwrap();
        assert_eq!(long.problem.chars().count(), MAX_PROBLEM);
        let all_claims = [
            "",
            "shop",
            "/data",
            "shop/",
            "shop/../x",
            "shop/a/b",
            "Shop/data",
            "shop/data-",
            "a.b/data",
            "shop/da ta",
        ];
        for claim in all_claims {
            assert!(!is_claim(claim), "{claim}");
        }
        assert!(!is_claim(&format!("shop/{}", "a".repeat(254))));
        assert!(!is_claim(&format!("{}/data", "a".repeat(64))));
        let unknown = with(|one| one.claim = "kube system/x".into()).unwrap();
        assert_eq!(unknown.claim, None);
    }
}
