from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('outbox', '0009_forward_endpoint'),
    ]

    operations = [
        migrations.CreateModel(
            name='PastCondition',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63)),
                ('subject', models.CharField(max_length=400)),
                ('severity', models.SmallIntegerField()),
                ('raised_at', models.DateTimeField()),
                ('seen_at', models.DateTimeField()),
            ],
            options={
                'verbose_name': 'past condition',
                'db_table': 'outbox_past_condition',
                'indexes': [models.Index(fields=['seen_at'], name='outbox_past_condition_seen_at')],
            },
        ),
        migrations.AddField(
            model_name='raisedcondition',
            name='worst',
            field=models.SmallIntegerField(db_default=0),
        ),
        migrations.AlterField(
            model_name='raisedcondition',
            name='kind',
            field=models.CharField(choices=[('condition', 'condition'), ('error', 'error of dead letters'), ('transaction', 'parked transaction'), ('pass', 'run of the pass')], max_length=15),
        ),
    ]
