//! One PersistentVolume on its way to another home: what is to be done next, decided from what is
//! there and from nothing else. So a run that was cut off anywhere is finished by the next one.

use super::manifest::{Homes, Manifest};

/// What is to be done next.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Next {
    /// Its policy becomes Retain, and the one that it had is written beside it: nobody may take
    /// its volume for one to be deleted.
    Retain,
    /// It's written down as it is.
    Note,
    /// It's deleted: this very version of it, which is written down.
    Delete,
    /// What holds it back is taken away. It's bound, so that Kubernetes would keep it for ever;
    /// that nobody uses it has been seen, and what it's of is written down.
    Release,
    /// This is made in its place.
    Make(Box<Manifest>),
    /// What is written down is needed no more.
    Strike,
    /// It's at its new home. Its policy may still be to be restored ([`Manifest::policy_before`]).
    Arrived,
    /// It's being deleted; nothing but time is missing.
    Wait,
    /// It isn't there, and nothing is written down: somebody has deleted it.
    Gone,
    /// It's left as it is, for this reason.
    Refuse(String),
}

/// A step that changes something, for those who watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Its policy becomes Retain.
    Retain,
    /// It's written down at the Pool object.
    Note,
    /// It's deleted.
    Delete,
    /// Its finalizers are taken away.
    Release,
    /// It's made again.
    Make,
    /// It's struck out at the Pool object.
    Strike,
    /// It's bound again, and gets back the policy that it had.
    Restore,
}

impl Next {
    /// What it changes.
    pub(super) fn step(&self) -> Option<Step> {
        match self {
            Next::Retain => Some(Step::Retain),
            Next::Note => Some(Step::Note),
            Next::Delete => Some(Step::Delete),
            Next::Release => Some(Step::Release),
            Next::Make(_) => Some(Step::Make),
            Next::Strike => Some(Step::Strike),
            Next::Arrived | Next::Wait | Next::Gone | Next::Refuse(_) => None,
        }
    }
}

/// Decides it. `noted` is what was written down.
pub(super) fn next(
    (key, home): (&str, &str),
    live: Option<&Manifest>,
    noted: Option<&Manifest>,
) -> Next {
    let Some(live) = live else {
        return match noted {
            Some(noted) => Next::Make(Box::new(noted.at(key, home))),
            None => Next::Gone,
        };
    };
    let handle = |manifest: &Manifest| manifest.0.data.pointer("/spec/csi/volumeHandle").cloned();
    if noted.is_some_and(|noted| handle(noted) != handle(live)) {
        return Next::Refuse(
            "a PersistentVolume of another volume has this name; the deleted PersistentVolume is stored in an annotation of the Pool object"
                .into(),
        );
    }
    match live.homes(key) {
        Homes::One(its) if its == home => {
            return match (noted.is_some(), live.is_leaving()) {
                (_, true) => Next::Refuse("it is being deleted by someone else".into()),
                (true, false) => Next::Strike,
                (false, false) => Next::Arrived,
            };
        }
        Homes::One(_) => {}
        Homes::Any => return Next::Arrived,
        Homes::Else => {
            return Next::Refuse(
                "its node affinity is not exactly one home; someone has edited it and must correct it"
                    .into(),
            );
        }
    }
    let same = noted.filter(|noted| noted.uid() == live.uid());
    if live.is_leaving() {
        return match (same, live.has_finalizers()) {
            (Some(_), true) => Next::Release,
            (Some(_), false) => Next::Wait,
            (None, _) => Next::Refuse("it is being deleted by someone else".into()),
        };
    }
    if live.policy() != "Retain" || live.policy_before().is_none() {
        return Next::Retain;
    }
    match same.filter(|noted| noted.version() == live.version()) {
        Some(_) => Next::Delete,
        None => Next::Note,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::manifest::POLICY;
    use super::super::manifest::tests::{KEY, volume};
    use super::*;

    /// An API server's PersistentVolume of one name, and what is written down.
    #[derive(Clone, Debug, Default)]
    struct World {
        live: Option<Manifest>,
        noted: Option<Manifest>,
        versions: u64,
        uids: u64,
    }

    impl World {
        fn new() -> World {
            World {
                live: Some(volume("pv", "pool.volume", "old")),
                noted: None,
                versions: 10,
                uids: 1,
            }
        }

        fn next(&self) -> Next {
            next((KEY, "new"), self.live.as_ref(), self.noted.as_ref())
        }

        fn change(&mut self, change: impl FnOnce(&mut Manifest)) {
            self.versions += 1;
            let live = self.live.as_mut().unwrap();
            change(live);
            live.0.metadata.resource_version = Some(self.versions.to_string());
        }

        /// Does one step; false if there is none to do.
        fn step(&mut self) -> bool {
            match self.next() {
                Next::Retain => self.change(|live| {
                    let before = live.policy().to_string();
                    let annotations = live.0.metadata.annotations.get_or_insert_default();
                    annotations.insert(POLICY.into(), before);
                    live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
                }),
                Next::Note => self.noted = self.live.as_ref().map(Manifest::plain),
                Next::Delete => self.change(|live| {
                    let now = serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
                    live.0.metadata.deletion_timestamp = Some(now);
                }),
                Next::Release => self.live = None,
                Next::Make(manifest) => {
                    self.uids += 1;
                    self.live = Some(*manifest);
                    let uid = format!("uid-{}", self.uids);
                    self.change(|live| live.0.metadata.uid = Some(uid));
                }
                Next::Strike => self.noted = None,
                Next::Arrived | Next::Wait | Next::Gone | Next::Refuse(_) => return false,
            }
            true
        }
    }

    #[test]
    fn it_arrives_from_wherever_a_run_was_cut_off() {
        let mut worlds = vec![World::new()];
        while worlds.last().unwrap().next() != Next::Arrived {
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
            // Either it's there or it's written down; and from its deletion on it's written down
            // until it's there again.
            assert!(world.live.is_some() || world.noted.is_some(), "{at}");
            let leaves = world.live.as_ref().is_some_and(Manifest::is_leaving);
            assert!(!leaves || world.noted.is_some(), "{at}");
            // Somebody changes it in between: what is made again has that too.
            let mut changed = world.clone();
            let may_change = changed.live.as_ref().is_some_and(|live| !live.is_leaving());
            if may_change {
                changed.change(|live| {
                    live.0.data["spec"]["capacity"] = json!({ "storage": "7Gi" });
                });
            }
            while changed.step() {}
            assert_eq!(changed.next(), Next::Arrived, "{at}");
            let live = changed.live.unwrap();
            assert_eq!(live.homes(KEY), Homes::One("new".into()));
            assert_eq!(live.policy_before(), Some("Delete"));
            assert_eq!(live.policy(), "Retain", "until it's bound");
            assert_eq!(live.bound().unwrap().uid, "claim-1");
            let grown = live.0.data.pointer("/spec/capacity/storage").unwrap() == "7Gi";
            assert_eq!(grown, may_change, "{at}");
        }
    }

    #[test]
    fn what_is_somebody_elses_is_left() {
        let mut world = World::new();
        assert_eq!(next((KEY, "new"), None, None), Next::Gone);
        // Deleted by somebody before anything was done.
        let now = serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
        world.change(|live| live.0.metadata.deletion_timestamp = Some(now));
        assert!(matches!(world.next(), Next::Refuse(why) if why.contains("being deleted")));
        // What is written down is of another one that had the name.
        let mut world = World::new();
        world.noted = world.live.as_ref().map(Manifest::plain);
        world.change(|live| live.0.metadata.uid = Some("uid-9".into()));
        assert_eq!(world.next(), Next::Retain, "its state is read as it is");
        world.step();
        assert_eq!(world.next(), Next::Note);
        world.noted = Some(volume("pv", "pool.other", "old"));
        assert!(matches!(world.next(), Next::Refuse(why) if why.contains("another volume")));
        // A policy that somebody has set to Retain stays so.
        let mut world = World::new();
        world.change(|live| {
            live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
        });
        while world.step() {}
        assert_eq!(world.live.unwrap().policy_before(), Some("Retain"));
    }
}
