/* The commit protocol of a root on an object store: a lease that its holder renews by
 * compare-and-swap, conditional creation of manifests, requests that arrive late, and kills.
 *
 * Built and run by tests/suites/model_check.py (`make model-check`). `code:` names the function that
 * a transition follows. Processes may stop for any time between two transitions: the clock goes on.
 * A request may be lost or arrive at any later time, also after its sender has given up or died.
 * Every save is on top of the one before it, and the writer of a new step deletes all older ones and
 * their data.
 *
 * Defines: WRITERS, COMMITS (of each) and CRASHES are the size; every other define is a bug.
 */

#ifndef WRITERS
#define WRITERS 3
#endif
#ifndef COMMITS
#define COMMITS 2
#endif
#ifndef CRASHES
#define CRASHES 2
#endif

#define LEASE 2  /* ticks for which a renewal holds; the code's `lease_seconds` */
#define NUMBERS 7  /* of manifests: COMMITS * WRITERS + 1 */
#define HAS(set, i) ((set) & (1 << (i)))
#define ADD(set, i) set = set | (1 << (i))
#define DROP(set, i) set = set & ~(1 << (i))

/* --- the store ------------------------------------------------------------------------------- */

byte claimant;  /* the writer in it, plus 1; 0: released, or never written */
byte manifest[NUMBERS];  /* its writer, plus 1; 0: absent */
byte deleted;  /* numbers whose step was deleted and whose data was collected */

/* --- the writers ----------------------------------------------------------------------------- */

byte left[WRITERS];  /* ticks for which a writer trusts its lease */
byte watched[WRITERS];  /* ticks since a writer that waits has seen the lease unchanged */
byte pending[WRITERS];  /* ticks that a renewal on its way would give */
byte current;  /* writers that know the present generation of control/zarr.json */
byte waiting, holds, lost, dead;  /* sets of writers */
byte dying;  /* the writer that is being killed, plus 1; nothing else happens meanwhile */
byte begun;  /* number of writers that have begun */
byte renewing;  /* writers whose renewal is on its way */
byte flight[WRITERS];  /* number of the manifest on its way, plus 1 */
byte reply[WRITERS];  /* 1: created, 2: refused */
byte crashes = CRASHES;

/* --- what was promised ----------------------------------------------------------------------- */

byte acked[NUMBERS];  /* the writer that acknowledged this number and has it still, plus 1 */
byte onto[NUMBERS];  /* the writer that acknowledged a step onto this one, plus 1 */

#define TRUSTS(w) (HAS(holds, w) && left[w] > 0)

/* code: deltacheck.store.lock.object_lease.ObjectLease.renew
 * A renewal that meets other content: another writer has the lease. */
inline arrive(w) {
	if
#ifndef RENEWED_WITHOUT_A_CONDITION
	:: !HAS(current, w) -> ADD(lost, w); DROP(holds, w); left[w] = 0
#endif
	:: else ->
		claimant = w + 1;
		current = 1 << w;  /* every write makes a new generation */
#ifdef LEASE_COUNTED_FROM_THE_REPLY
		left[w] = LEASE
#else
		left[w] = pending[w]
#endif
	fi;
	pending[w] = 0;
	DROP(renewing, w)
}

#define me _pid  /* writers are the first processes of this file */

active [WRITERS] proctype Writer() provided (dying == 0 || dying == _pid + 1) {
	byte number, commits;
	{
		/* code: deltacheck.store.lock.object_lease.ObjectLease._wait_until_free
		 * Writers are alike until they begin: numbered as they begin, they need no other order. */
		atomic { begun == me ->
			begun++;
			ADD(current, me);
			watched[me] = 0;
			if
			/* code: deltacheck.store.lock.object_lease._is_dead
			 * A dead process of the same machine, or of another one. */
			:: claimant == 0 || HAS(dead, claimant - 1) -> pending[me] = LEASE
			:: claimant != 0 -> ADD(waiting, me)
			fi
		};
		/* code: deltacheck.store.lock.object_lease.ObjectLease.__init__
		 * The time of the lease is counted from before the request. To decide earlier than right
		 * before it changes nothing, unless the generation changes, and then the request fails. */
		if
		:: !HAS(waiting, me)
		:: atomic { HAS(waiting, me) && !HAS(current, me) -> DROP(waiting, me); watched[me] = 0;
				if
				:: claimant == 0 -> ADD(current, me); pending[me] = LEASE  /* released meanwhile */
				:: else -> goto ended  /* RootBusy: the holder lives */
				fi
			}
#ifdef EXPIRY_NOT_AWAITED
		:: atomic { HAS(waiting, me) && HAS(current, me) ->
#else
		:: atomic { HAS(waiting, me) && HAS(current, me) && watched[me] >= LEASE ->
#endif
				DROP(waiting, me); watched[me] = 0; pending[me] = LEASE
			}
		fi;
		/* code: deltacheck.store.files.object_path.ObjectPath.swap */
		atomic {
			if
			:: !HAS(current, me) -> pending[me] = 0; goto ended  /* RootBusy */
			:: else ->
				if
				:: claimant != 0 -> DROP(dead, claimant - 1)
				:: else
				fi;
				claimant = me + 1;
				current = 1 << me
			fi
		};
		/* The reply may come much later. */
		atomic {
#ifdef LEASE_COUNTED_FROM_THE_REPLY
			left[me] = LEASE;
#else
			left[me] = pending[me];
#endif
			pending[me] = 0;
			ADD(holds, me)
		};
		/* code: deltacheck.store.roots.root.Root.next_seq
		 * The committed number after the newest. */
		atomic {
			number = NUMBERS;
			do
			:: number > 0 && manifest[number - 1] == 0 -> number--
			:: else -> break
			od
		};
		do
		:: commits == COMMITS || number == NUMBERS -> break
		:: break  /* close */
		:: commits < COMMITS && number < NUMBERS ->
			/* code: deltacheck.store.lock.object_lease.ObjectLease.seconds_left */
			if
			:: HAS(lost, me) -> goto ended  /* RootBusy */
			:: !HAS(lost, me) && left[me] > 0
			:: !HAS(lost, me) && left[me] == 0 && !HAS(renewing, me) -> goto ended  /* StorageFailed */
			fi;
			/* code: deltacheck.store.files.object_path.ObjectPath.create
			 * The process may stop between the check and the request. */
			atomic { flight[me] = number + 1; reply[me] = 0 };
			if
			:: reply[me] == 1
			:: reply[me] == 2 -> goto ended  /* RootBusy: the number is another writer's */
			:: atomic { true ->
					/* No answer in time. The manifest is read: it is this writer's, or absent, and
					 * may still arrive, or another's. */
					if
					:: manifest[number] == me + 1
					:: manifest[number] != me + 1 -> goto ended
					fi
				}
			fi;
#ifndef COMMIT_NOT_CHECKED_AFTERWARDS
			/* code: deltacheck.store.commit.commit
			 * Once more: nothing is acknowledged after the end of the lease. */
			atomic {
				if
				:: HAS(lost, me) || left[me] == 0 -> goto ended
				:: else
				fi;
#else
			atomic {
#endif
				/* wait() returns. A writer that was fenced off has failed. */
				assert(claimant == me + 1);
				assert(manifest[number] == me + 1);
				/* What this step is on top of has not been collected, nor built on by another. */
				assert(number == 0 || !HAS(deleted, number - 1) || acked[number - 1] == 0);
				assert(number == 0 || onto[number - 1] == 0);
				acked[number] = me + 1;
				if
				:: number > 0 -> onto[number - 1] = me + 1
				:: else
				fi;
				commits++;
				reply[me] = 0
			};
			/* code: deltacheck.save.root_writer.RootWriter.retain
			 * The lease is checked before each deletion. */
			if
			:: number > 0 ->
				if
#ifdef DELETED_WITHOUT_A_CHECK
				:: atomic { true ->
#else
				:: atomic { !HAS(lost, me) && left[me] > 0 ->
#endif
						/* Whoever may delete has the lease. */
						assert(claimant == me + 1);
						acked[number - 1] = 0;
						manifest[number - 1] = 0;
						ADD(deleted, number - 1)
					}
				:: HAS(lost, me) || left[me] == 0 -> goto ended
				fi
			:: true
			fi;
			number++
		od;
		/* code: deltacheck.store.lock.object_lease.ObjectLease.release */
		atomic {
			if
			:: HAS(holds, me) && HAS(current, me) -> current = 0; claimant = 0
			:: else
			fi;
			DROP(holds, me)
		};
	} unless { HAS(dead, me) };
ended:	atomic {
		DROP(holds, me); DROP(waiting, me); DROP(renewing, me); DROP(lost, me);
		DROP(current, me);
		left[me] = 0; watched[me] = 0; pending[me] = 0; reply[me] = 0;
		number = 0; commits = 0;
		/* Nobody asks any more whether a writer is dead that does not have the lease. */
		if
		:: claimant != me + 1 -> DROP(dead, me)
		:: else
		fi;
		if
		:: dying == me + 1 -> dying = 0
		:: else
		fi
	}
}

/* The threads that renew, and the network: what was sent arrives at any time, or never. */
active proctype Network() provided (dying == 0) {
	byte w;
end:	do
	:: atomic {
			w = 0;
			do
			:: w < WRITERS - 1 -> w++
			:: break
			od;
			if
			/* code: deltacheck.store.lock.object_lease._renew */
			:: TRUSTS(w) && !HAS(renewing, w) && left[w] < LEASE ->
				ADD(renewing, w); pending[w] = LEASE
			:: HAS(renewing, w) && HAS(holds, w) -> arrive(w)
			:: HAS(renewing, w) -> DROP(renewing, w); pending[w] = 0  /* StorageFailed */
			/* code: deltacheck.store.commit.commit
			 * The conditional creation of the manifest: the step exists. */
			:: flight[w] != 0 ->
				if
#ifdef MANIFEST_CREATED_WITHOUT_A_CONDITION
				:: true ->
#else
				:: manifest[flight[w] - 1] == 0 ->
#endif
					manifest[flight[w] - 1] = w + 1; reply[w] = 1
#ifndef MANIFEST_CREATED_WITHOUT_A_CONDITION
				:: else -> reply[w] = 2
#endif
				fi;
				flight[w] = 0
			fi;
			w = 0
		}
	od
}

/* The clock of all processes: they run at one speed, and no two clocks are compared. */
active proctype Clock() provided (dying == 0) {
	byte w;
end:	do
	:: d_step {
			w = 0;
			do
			:: w < WRITERS ->
				if
				:: left[w] > 0 -> left[w]--
				:: else
				fi;
				if
				:: pending[w] > 0 -> pending[w]--
				:: else
				fi;
				if
				:: HAS(waiting, w) && watched[w] < LEASE -> watched[w]++
				:: else
				fi;
				w++
			:: else -> break
			od;
			w = 0
		}
	od
}

active proctype Crash() provided (dying == 0) {
	byte w;
end:	do
	:: atomic { crashes > 0 && (holds | waiting) ->
			crashes--;
			w = 0;
			do
			:: HAS(holds | waiting, w) -> break
			:: (holds | waiting) >> (w + 1) -> w++
			od;
			ADD(dead, w);
			dying = w + 1;
			w = 0
		}
	od
}

#define KEPT(n) (acked[n] == 0 || manifest[n] == acked[n])

/* --- properties: enabled in a state that violates one, and in no other, so they add no state */
active proctype Properties() {
end:	do
	/* At most one writer trusts its lease. */
	:: TRUSTS(0) && TRUSTS(1) -> assert(!(TRUSTS(0) && TRUSTS(1)))
	:: TRUSTS(0) && TRUSTS(WRITERS - 1) -> assert(!(TRUSTS(0) && TRUSTS(WRITERS - 1)))
#if WRITERS > 2
	:: TRUSTS(1) && TRUSTS(2) -> assert(!(TRUSTS(1) && TRUSTS(2)))
#endif
	/* An acknowledged step stays until it is deleted. */
	:: !(KEPT(0) && KEPT(1) && KEPT(2) && KEPT(3) && KEPT(4) && KEPT(5) && KEPT(6)) ->
		assert(KEPT(0) && KEPT(1) && KEPT(2) && KEPT(3) && KEPT(4) && KEPT(5) && KEPT(6))
	od
}
