//! The steps of one PersistentVolume to another home. The next one is decided from what exists and
//! from nothing else, so a run that was interrupted anywhere is completed by the next run.

use super::manifest::{Goal, HANDLE, Homes, Manifest};
use crate::router::kube::reconcile::Next;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The PersistentVolume gets the policy Retain, and an annotation with the policy that it had,
    /// so that its volume cannot be deleted with it.
    Retain,
    /// The PersistentVolume is stored as it is in an annotation of the Pool object.
    Note,
    /// The PersistentVolume is deleted: exactly the version that is stored.
    Delete,
    /// The finalizers of the PersistentVolume are removed. It is bound, so Kubernetes would keep it
    /// for ever. It was checked that nothing uses it, and it is stored.
    Release,
    /// The PersistentVolume is created again at its new home.
    Make,
    /// The annotation of the Pool object is removed, because it is not needed any more.
    Strike,
    /// The PersistentVolume is bound again, and gets back the policy that it had.
    Restore,
}

/// Decides the next step. `noted` is what was stored at the Pool object. After the last one the
/// PersistentVolume is at its new home, where its policy may still have to be restored
/// ([`Manifest::policy_before`]); or it does not exist and is not stored, so someone has deleted it.
pub(in crate::router::kube) fn next(
    goal: Goal<'_>,
    live: Option<&Manifest>,
    noted: Option<&Manifest>,
) -> Next<Step> {
    let Some(live) = live else {
        return match noted {
            Some(_) => Next::Step(Step::Make),
            None => Next::Done,
        };
    };
    let refuse = |why: &str| Next::Refused(why.into());
    let is_made = goal
        .handle
        .is_none_or(|handle| live.text(HANDLE) == Some(handle));
    let is_new = goal.handle.is_some() && is_made;
    if !is_new && noted.is_some_and(|noted| noted.text(HANDLE) != live.text(HANDLE)) {
        return refuse(
            "a PersistentVolume of another volume has this name; the deleted PersistentVolume is stored in an annotation of the Pool object",
        );
    }
    match live.homes(goal.key) {
        Homes::One(its) if its == goal.home && is_made => {
            return match (noted.is_some(), live.is_leaving()) {
                (_, true) => refuse("it is being deleted by someone else"),
                (true, false) => Next::Step(Step::Strike),
                (false, false) => Next::Done,
            };
        }
        Homes::One(_) => {}
        Homes::Any if goal.handle.is_none() => return Next::Done,
        Homes::Any | Homes::Else => {
            return refuse(
                "its node affinity is not exactly one home; someone has edited it and must correct it",
            );
        }
    }
    let same = noted.filter(|noted| noted.uid() == live.uid());
    if live.is_leaving() {
        return match (same, live.has_finalizers()) {
            (Some(_), true) => Next::Step(Step::Release),
            (Some(_), false) => Next::Wait,
            (None, _) => refuse("it is being deleted by someone else"),
        };
    }
    if live.policy() != "Retain" || live.policy_before().is_none() {
        return Next::Step(Step::Retain);
    }
    match same.filter(|noted| noted.version() == live.version()) {
        Some(_) => Next::Step(Step::Delete),
        None => Next::Step(Step::Note),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::manifest::POLICY;
    use super::super::manifest::tests::{KEY, volume};
    use super::*;

    /// The PersistentVolume of one name at an API server, and what is stored of it.
    #[derive(Clone, Debug, Default)]
    struct World {
        live: Option<Manifest>,
        noted: Option<Manifest>,
        versions: u64,
        uids: u64,
        home: &'static str,
        handle: Option<&'static str>,
    }

    impl World {
        fn new() -> World {
            World {
                live: Some(volume("pv", "pool.volume", "old")),
                noted: None,
                versions: 10,
                uids: 1,
                home: "new",
                handle: None,
            }
        }

        fn goal(&self) -> Goal<'static> {
            Goal {
                key: KEY,
                home: self.home,
                handle: self.handle,
            }
        }

        fn next(&self) -> Next<Step> {
            next(self.goal(), self.live.as_ref(), self.noted.as_ref())
        }

        fn change(&mut self, change: impl FnOnce(&mut Manifest)) {
            self.versions += 1;
            let live = self.live.as_mut().unwrap();
            change(live);
            live.0.metadata.resource_version = Some(self.versions.to_string());
        }

        /// Does one step; false if there is none.
        fn step(&mut self) -> bool {
            let Next::Step(step) = self.next() else {
                return false;
            };
            match step {
                Step::Retain => self.change(|live| {
                    let before = live.policy().to_string();
                    let annotations = live.0.metadata.annotations.get_or_insert_default();
                    annotations.insert(POLICY.into(), before);
                    live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
                }),
                Step::Note => self.noted = self.live.as_ref().map(Manifest::plain),
                Step::Delete => self.change(|live| {
                    let now = serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
                    live.0.metadata.deletion_timestamp = Some(now);
                }),
                Step::Release => self.live = None,
                Step::Make => {
                    self.uids += 1;
                    let goal = self.goal();
                    self.live = self.noted.as_ref().map(|noted| noted.at(goal));
                    let uid = format!("uid-{}", self.uids);
                    self.change(|live| live.0.metadata.uid = Some(uid));
                }
                Step::Strike => self.noted = None,
                Step::Restore => panic!("it is done once all are bound"),
            }
            true
        }
    }

    #[test]
    fn it_arrives_from_wherever_a_run_was_cut_off() {
        arrives(World::new());
        // With another volume, at another home and at the same one.
        for home in ["new", "old"] {
            arrives(World {
                home,
                handle: Some("other-pool.copy"),
                ..World::new()
            });
        }
    }

    fn arrives(begin: World) {
        let (home, handle) = (begin.home, begin.handle);
        let mut worlds = vec![begin];
        while worlds.last().unwrap().next() != Next::Done {
            let mut world = worlds.last().unwrap().clone();
            assert!(world.step(), "{:?}", world.next());
            worlds.push(world);
        }
        assert_eq!(
            worlds.len(),
            7,
            "retain, note, delete, release, make, strike"
        );
        for (at, world) in worlds.iter().enumerate() {
            // It exists or it is stored, and after its deletion it stays stored until it exists
            // again.
            assert!(world.live.is_some() || world.noted.is_some(), "{at}");
            let leaves = world.live.as_ref().is_some_and(Manifest::is_leaving);
            assert!(!leaves || world.noted.is_some(), "{at}");
            // Someone changes it in between: the new object has the change too.
            let mut changed = world.clone();
            let may_change = changed.live.as_ref().is_some_and(|live| !live.is_leaving());
            if may_change {
                changed.change(|live| {
                    live.0.data["spec"]["capacity"] = json!({ "storage": "7Gi" });
                });
            }
            while changed.step() {}
            assert_eq!(changed.next(), Next::Done, "{at}");
            let live = changed.live.unwrap();
            assert_eq!(live.homes(KEY), Homes::One(home.into()));
            let expected = handle.unwrap_or("pool.volume");
            assert_eq!(live.text(HANDLE), Some(expected));
            assert_eq!(live.policy_before(), Some("Delete"));
            assert_eq!(live.policy(), "Retain", "until it's bound");
            assert_eq!(live.bound().unwrap().uid, "claim-1");
            let grown = live.0.data.pointer("/spec/capacity/storage").unwrap() == "7Gi";
            assert_eq!(grown, may_change, "{at}");
        }
    }

    #[test]
    fn what_belongs_to_another_user_is_left() {
        let mut world = World::new();
        assert_eq!(next(world.goal(), None, None), Next::Done);
        // Someone deletes it before the first step.
        let now = serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
        world.change(|live| live.0.metadata.deletion_timestamp = Some(now));
        assert!(matches!(world.next(), Next::Refused(why) if why.contains("being deleted")));
        // An earlier object with this name is stored.
        let mut world = World::new();
        world.noted = world.live.as_ref().map(Manifest::plain);
        world.change(|live| live.0.metadata.uid = Some("uid-9".into()));
        assert_eq!(
            world.next(),
            Next::Step(Step::Retain),
            "its state is read as it is"
        );
        world.step();
        assert_eq!(world.next(), Next::Step(Step::Note));
        world.noted = Some(volume("pv", "pool.other", "old"));
        assert!(matches!(world.next(), Next::Refused(why) if why.contains("another volume")));
        // A policy that was Retain before stays so.
        let mut world = World::new();
        world.change(|live| {
            live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
        });
        while world.step() {}
        assert_eq!(world.live.unwrap().policy_before(), Some("Retain"));
    }
}
