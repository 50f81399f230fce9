#!/bin/sh
# sbatch, scontrol and scancel by name. $FAKE/states has what scontrol says, a line for each time it is asked; the last one stays.
name=$(basename "$0")
echo "$name $*" >> "$FAKE/calls"
case $name in
sbatch)
    if [ -e "$FAKE/refusal" ]; then cat "$FAKE/refusal" >&2; exit 1; fi
    env > "$FAKE/environment"
    cp "$2" "$FAKE/script"
    [ -e "$FAKE/log" ] && cp "$FAKE/log" "$(dirname "$2")/7.log"
    [ -e "$FAKE/interrupts" ] && kill -INT "$PPID"
    echo "7;here"
    ;;
scontrol)
    state=$(head -n 1 "$FAKE/states")
    if [ "$(wc -l < "$FAKE/states")" -gt 1 ]; then sed -i 1d "$FAKE/states"; fi
    case $state in slurm_load_jobs*) echo "$state" >&2; exit 1 ;; esac
    echo "JobId=7 JobName=dcpbench $state"
    ;;
scancel)
    echo "JobState=CANCELLED Reason=None ExitCode=0:15" > "$FAKE/states"
    ;;
esac
